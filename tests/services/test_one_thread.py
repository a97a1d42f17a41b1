"""Tests the invariant of fair_queue.OneThread."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref

import pytest
from prometheus_client import CollectorRegistry

from nouscoder.http_server.fair_queue import OneThread, QueueFull
from nouscoder.verifier.observe.metrics import VerifierMetrics


class _Held:
    """A work that goes on until `released`, and notes the works that begin."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.released = threading.Event()

    def hold(self) -> None:
        self.begun.append("hold")
        assert self.released.wait(60)

    async def has_begun(self) -> None:
        while not self.begun:
            await asyncio.sleep(0)


async def test_a_work_that_has_not_begun_in_time_never_begins() -> None:
    held, thread = _Held(), OneThread("test", patience_s=0.05)
    first = asyncio.ensure_future(thread.run(held.hold))
    await held.has_begun()
    with pytest.raises(QueueFull):
        await thread.run(held.begun.append, "late")
    held.released.set()
    await first  # it had begun, and had more time than the patience
    assert await thread.run(len, held.begun) == 1


async def test_a_work_whose_caller_has_gone_never_begins() -> None:
    held, thread = _Held(), OneThread("test")
    first = asyncio.ensure_future(thread.run(held.hold))
    await held.has_begun()
    second = asyncio.ensure_future(thread.run(held.begun.append, "gone"))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    held.released.set()
    await first
    assert await thread.run(len, held.begun) == 1


async def test_waits_are_counted_and_shown() -> None:
    held, thread = _Held(), OneThread("test")
    registry = CollectorRegistry()
    VerifierMetrics(registry).scraped.threads = lambda: {"body": thread.waits}
    first = asyncio.ensure_future(thread.run(held.hold))
    await held.has_begun()
    second = asyncio.ensure_future(thread.run(int))
    await asyncio.sleep(0.05)
    held.released.set()
    await asyncio.gather(first, second)
    name = "nouscoder_verifier_thread_wait_seconds"
    assert registry.get_sample_value(f"{name}_count", {"for": "body"}) == 2
    waited_s = registry.get_sample_value(f"{name}_sum", {"for": "body"})
    assert waited_s is not None
    assert waited_s >= 0.05


async def test_an_error_keeps_nothing_until_a_garbage_collection() -> None:
    class Large:
        """Represents a submission."""

    def fail(_large: Large) -> None:
        raise ValueError

    large, thread = Large(), OneThread("test")
    found = weakref.ref(large)
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            await thread.run(fail, large)
        del large
        await thread.run(int)  # the thread has let go of the first work
        assert found() is None
    finally:
        gc.enable()
