"""Two programs that talk with each other, over the frame protocol (see frames.py: CONVERSE, TALK, INPUT, OUTPUT).

Slots with a socket to each other connect the programs by pipes, so that no byte passes through the gateway. Otherwise
(two gVisor sandboxes) the gateway copies the output of each to the input of the other.

INVARIANT: after an unexpected answer the slot is stopped and SandboxError raised.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from nouscoder.domain.submission import Limits
from nouscoder.verifier.harness import frames
from nouscoder.verifier.harness.frames import Kind
from nouscoder.verifier.sandbox.base import RunResult, SandboxError
from nouscoder.verifier.sandbox.slot import Slot


@dataclass(slots=True)
class Talker:
    """One side. `receive` and `to_result` are those of its session: they stop the slot before they raise."""

    slot: Slot
    limits: Limits
    receive: Callable[[float], Awaitable[tuple[Kind, bytes]]]
    to_result: Callable[[bytes], Awaitable[RunResult]]
    has_ended: bool = False


async def converse(one: Talker, other: Talker) -> tuple[RunResult, RunResult]:
    """Run both programs, whose sessions are prepared. Returns both results. Raises SandboxError."""
    is_direct = one.slot.has_peer and other.slot.has_peer
    try:
        return await (_join(one, other) if is_direct else _relay_both(one, other))
    except* SandboxError as errors:
        raise SandboxError(str(errors.exceptions[0])) from errors


async def _join(one: Talker, other: Talker) -> tuple[RunResult, RunResult]:
    """Connect the programs by pipes, and wait for both results."""
    nonce = secrets.token_bytes(frames.NONCE_BYTES)
    spare_s = max(0.0, other.limits.wall_time_s - one.limits.wall_time_s)
    longest_s = one.limits.wall_time_s + spare_s
    await one.slot.send(Kind.CONVERSE, frames.pack_terms(nonce, is_host=True, spare_s=spare_s))
    await other.slot.send(Kind.CONVERSE, frames.pack_terms(nonce, is_host=False, spare_s=0.0))
    async with asyncio.TaskGroup() as group:
        first = group.create_task(_result(one, longest_s))
        second = group.create_task(_result(other, longest_s))
    return first.result(), second.result()


async def _result(talker: Talker, limit_s: float) -> RunResult:
    kind, payload = await talker.receive(limit_s)
    if kind is not Kind.RESULT:
        await talker.slot.stop()
        raise SandboxError(f"slot {talker.slot.index} answered {kind.name} in a conversation")
    return await talker.to_result(payload)


async def _relay_both(one: Talker, other: Talker) -> tuple[RunResult, RunResult]:
    await one.slot.send(Kind.TALK)
    await other.slot.send(Kind.TALK)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(_relay(one, other))
        second = group.create_task(_relay(other, one))
    return first.result(), second.result()


async def _relay(speaker: Talker, listener: Talker) -> RunResult:
    """Pass the output of `speaker` to `listener` until its program ends. Its slot is trusted with no limit."""
    now_s = asyncio.get_running_loop().time
    end_s = now_s() + speaker.limits.wall_time_s
    left_bytes = frames.session_bound(speaker.limits.output_bytes)
    speaks = True
    while True:
        kind, payload = await speaker.receive(max(0.0, end_s - now_s()))
        left_bytes -= len(payload)
        if kind is Kind.OUTPUT and payload and speaks and left_bytes > 0:
            await listener.slot.send(Kind.INPUT, payload)
        elif kind is Kind.OUTPUT_END and speaks:
            speaks = False
            await listener.slot.send(Kind.INPUT_END)
        elif kind is Kind.RESULT:
            result = replace(await speaker.to_result(payload), partner_ended=listener.has_ended)
            speaker.has_ended = True
            if speaks:
                await listener.slot.send(Kind.INPUT_END)
            return result
        else:
            await speaker.slot.stop()
            raise SandboxError(f"slot {speaker.slot.index} answered {kind.name} in a conversation")
