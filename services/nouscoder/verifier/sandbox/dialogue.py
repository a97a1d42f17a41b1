"""A running program that the gateway talks to, over the frame protocol (see frames.py: TALK, INPUT, OUTPUT, HOLD).

INVARIANT: after `hold` has returned None, none of the program's processes runs until the next `say`. After an
unexpected answer the slot is stopped and SandboxError raised. What the program itself causes is a result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from nouscoder.verifier.harness.frames import Kind
from nouscoder.verifier.sandbox.base import RunResult, SandboxError
from nouscoder.verifier.sandbox.slot import Slot


class SlotDialogue:
    """Implements `Dialogue` for a slot whose program has just been sent TALK."""

    def __init__(
        self,
        slot: Slot,
        receive: Callable[[float], Awaitable[tuple[Kind, bytes]]],
        to_result: Callable[[bytes], Awaitable[RunResult]],
        out_of_memory: Callable[[], Awaitable[RunResult | None]],
        most_bytes: int,
    ) -> None:
        """The three functions are the session's. `receive` stops the slot on errors. `out_of_memory` says after one
        whether the kernel killed the slot for the program's memory. `most_bytes` bounds all output.
        """
        self._slot = slot
        self._receive = receive
        self._to_result = to_result
        self._out_of_memory = out_of_memory
        self._left_bytes = most_bytes
        self._output_ended = False
        self._result: RunResult | None = None

    async def say(self, data: bytes) -> None:
        """See `Dialogue`."""
        await self._send(Kind.INPUT, data)

    async def hear(self, limit_s: float) -> bytes | RunResult:
        """See `Dialogue`."""
        async with asyncio.timeout(limit_s):
            kind, payload = await self._next(limit_s)
        return payload if kind is Kind.OUTPUT or self._result is None else self._result

    async def hold(self) -> RunResult | None:
        """See `Dialogue`."""
        await self._send(Kind.HOLD)
        kind = Kind.OUTPUT
        while kind is Kind.OUTPUT:
            kind, _ = await self._next(0.0, Kind.HELD)
        return self._result

    async def _send(self, kind: Kind, data: bytes = b"") -> None:
        if self._result is not None:
            return
        try:
            await self._slot.send(kind, data)
        except SandboxError as error:
            await self._end_or_raise(error)

    async def _next(self, limit_s: float, *expected: Kind) -> tuple[Kind, bytes]:
        """The next frame: OUTPUT, RESULT (kept in `_result`), or one of `expected`. OUTPUT_END is passed over, once."""
        if self._result is not None:
            return Kind.RESULT, b""
        try:
            kind, payload = await self._receive(limit_s)
            if kind is Kind.OUTPUT_END and not payload and not self._output_ended:
                self._output_ended = True
                kind, payload = await self._receive(limit_s)
        except SandboxError as error:
            await self._end_or_raise(error)
            return Kind.RESULT, b""
        self._left_bytes -= len(payload)
        if kind is Kind.RESULT:
            self._result = await self._to_result(payload)
        elif kind not in expected and (kind is not Kind.OUTPUT or not payload or self._left_bytes < 0):
            await self._slot.stop()
            raise SandboxError(f"slot {self._slot.index} answered {kind.name} in a dialogue")
        return kind, payload

    async def _end_or_raise(self, error: SandboxError) -> None:
        """End the dialogue if the program's memory was the cause of `error`, else raise it."""
        self._result = await self._out_of_memory()
        if self._result is None:
            raise error
