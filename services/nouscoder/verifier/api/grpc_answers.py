"""The answers of one gRPC call in the memory budget.

INVARIANT: an answer is counted before it is handed to gRPC, and until the call has ended.

A server cannot end a call whose client takes no answer: gRPC for Python has no such function. (It closes a connection
that answers no pings, within a minute.) So a client can keep the bytes of an answer counted. Therefore gRPC's answers
have a part of the budget, and leave the rest to other requests.
"""

from __future__ import annotations

from typing import Protocol

import grpc

from nouscoder.verifier.access.memory_budget import MemoryBudget, Reservation

SHARE = 0.25  # of the memory budget


class _Message(Protocol):
    def ByteSize(self) -> int:  # noqa: N802 - of protobuf
        """The size on the wire."""
        ...


class CallAnswers:
    """Counts in `budget`, the part of gRPC's answers, until the call of `context` has ended."""

    def __init__(self, budget: MemoryBudget, context: grpc.aio.ServicerContext[object, object]) -> None:
        self._reservation = Reservation(budget)
        self._reservation.close_after(context)

    async def add(self, answer: _Message) -> None:
        """Count an answer that is sent next. Raises MemoryBudgetExceeded."""
        await self._reservation.add_answer(answer.ByteSize())
