"""Which gateway processes hang: real processes behind a channel, and records of what the kernel says about a thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.verifier.processes.connections import Channel
from nouscoder.verifier.processes.parent import SilenceLimit, Thread, could_answer_s, main_thread, until_hung

_LIMIT_S = 120.0
_PATIENCE = SilenceLimit(ask_period_s=0.05, silence_limit_s=1.0)

# Answers its parent, and does `act` 0.2 s after its start.
_PROGRAM = """
import asyncio, os, signal, socket, sys, threading, time
from nouscoder.verifier.processes.connections import Arrivals

def compute():
    while True:
        pass

async def serve():
    ended = asyncio.Event()
    arrivals = Arrivals(socket.socket(fileno=int(sys.argv[1])), ended.set)
    arrivals.say_ready()
    asyncio.get_running_loop().call_later(0.2, ACT)
    await ended.wait()

asyncio.run(serve())
"""


@asynccontextmanager
async def process_that(act: str) -> AsyncIterator[tuple[Channel, int]]:
    channel = Channel()
    descriptor = channel.theirs.fileno()
    command = (sys.executable, "-c", _PROGRAM.replace("ACT", act), str(descriptor))
    process = await asyncio.create_subprocess_exec(*command, pass_fds=(descriptor,))
    channel.theirs.close()
    try:
        async with asyncio.timeout(_LIMIT_S):
            await channel.ready.wait()
        yield channel, process.pid
    finally:
        process.kill()
        await process.wait()
        channel.close()


def watched(channel: Channel, pid: int) -> asyncio.Task[None]:
    return asyncio.create_task(until_hung(channel, lambda: main_thread(pid), _PATIENCE))


@pytest.mark.parametrize(
    "act",
    [
        pytest.param("compute", id="computes without an end"),
        pytest.param("lambda: time.sleep(1000)", id="waits"),
        pytest.param("lambda: os.kill(os.getpid(), signal.SIGSTOP)", id="is stopped"),
        pytest.param("arrivals._channel.close", id="has closed its channel"),
    ],
)
async def test_a_process_that_cannot_answer_hangs(act: str) -> None:
    async with process_that(act) as (channel, pid):
        watch = watched(channel, pid)
        await asyncio.wait({watch}, timeout=_LIMIT_S)
        assert watch.done()
        assert main_thread(pid) is not None, "it hangs and has not ended"


async def test_a_process_that_answers_does_not_hang_however_busy_its_other_threads_are() -> None:
    async with process_that("threading.Thread(target=compute, daemon=True).start") as (channel, pid):
        watch = watched(channel, pid)
        async with asyncio.timeout(_LIMIT_S):
            while channel.num_answers < 30:  # asked for longer than the limit
                await asyncio.sleep(0.01)
        assert not watch.done()
        watch.cancel()


class Silent(Channel):
    """That of a process that never answers. Counts the questions."""

    def __init__(self) -> None:  # no socket
        self.num_asked = self.num_answers = 0

    def ask(self) -> None:
        self.num_asked += 1


async def num_asked(threads: Iterable[Thread | None]) -> int:
    """How often a silent process is asked until it counts as hung, after 10 periods, or `threads` ends."""
    silent, looks = Silent(), iter(threads)
    with contextlib.suppress(LookEnded):
        await until_hung(silent, lambda: next_of(looks), SilenceLimit(ask_period_s=1e-3, silence_limit_s=9.75e-3))
    return silent.num_asked


class LookEnded(Exception):
    """No more is recorded."""


def next_of(looks: Iterator[Thread | None]) -> Thread | None:
    try:
        return next(looks)
    except StopIteration:
        raise LookEnded from None


async def test_a_process_that_waits_for_a_cpu_does_not_hang() -> None:
    starved = [Thread(is_runnable=True, cpu_s=1.0, queued_s=2.0)] * 200
    assert await num_asked(starved) == 200
    late = [Thread(is_runnable=False, cpu_s=1.0, queued_s=period * 1e-3) for period in range(200)]
    assert await num_asked(late) == 200, "each time it had waited for a CPU when it was looked at"


async def test_a_process_that_waits_for_something_else_hangs() -> None:
    assert await num_asked([Thread(is_runnable=False, cpu_s=1.0, queued_s=2.0)] * 200) == 10
    assert await num_asked([None] * 200) == 10, "nothing is known of it"


async def test_a_process_that_computes_hangs_when_its_cpu_time_is_over() -> None:
    with_half_a_cpu = [Thread(is_runnable=True, cpu_s=period * 5e-4, queued_s=0.0) for period in range(200)]
    assert await num_asked(with_half_a_cpu) == 20


THREADS = st.builds(Thread, st.booleans(), st.floats(0, 1e6), st.floats(0, 1e6))


@given(before=st.none() | THREADS, now=st.none() | THREADS, period_s=st.floats(1e-3, 60))
def test_a_period_counts_as_its_length_at_most(before: Thread | None, now: Thread | None, period_s: float) -> None:
    assert 0 <= could_answer_s(before, now, period_s) <= period_s


def test_the_kernel_tells_of_the_own_thread() -> None:
    before = main_thread(os.getpid())
    assert before is not None
    begun_s = time.thread_time()
    while time.thread_time() < begun_s + 0.1:  # the kernel tells whole hundredths of a second
        pass
    now = main_thread(os.getpid())
    assert now is not None
    assert now.is_runnable
    assert now.cpu_s > before.cpu_s
    assert now.queued_s > 0, "this kernel keeps no statistics of its scheduler"
    assert main_thread(2**22 + 1) is None, "no process can have this number"
