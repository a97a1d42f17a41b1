"""Tests the invariant of full_collections.py."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import weakref
from collections.abc import AsyncIterator, Iterator

import pytest

from nouscoder.verifier.access.memory_budget import MemoryBudget
from nouscoder.verifier.observe import full_collections
from nouscoder.verifier.observe.full_collections import EVERY_S, LATEST_S, LITTLE_SHARE, FullCollections

_SOME = 11  # collections of younger values


@pytest.mark.parametrize(
    ("waited_s", "held_share", "num_smaller", "is_due"),
    [
        (EVERY_S, 0.0, _SOME, True),
        (EVERY_S, LITTLE_SHARE, _SOME, True),
        (EVERY_S - 1, 0.0, _SOME, False),
        (LATEST_S, 0.0, _SOME - 1, False),
        (LATEST_S - 1, 2 * LITTLE_SHARE, _SOME, False),
        (LATEST_S, 1.0, _SOME, True),
    ],
)
def test_a_collection_is_due_when_requests_hold_little_or_it_is_late(
    waited_s: float, held_share: float, num_smaller: int, is_due: bool
) -> None:
    assert FullCollections(last_s=100.0).is_due(100.0 + waited_s, held_share, num_smaller) is is_due


class _Clock:
    """Advances by `step_s` each time that it is read."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


@pytest.fixture
def full() -> Iterator[list[int]]:
    """Gets an item for each full collection."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            found.append(1)

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)


@contextlib.asynccontextmanager
async def _running(clock: _Clock) -> AsyncIterator[None]:
    task = asyncio.create_task(full_collections.run(MemoryBudget(1), clock))
    await asyncio.sleep(0)
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="the collector of Python 3.14 is another one")
async def test_the_interpreter_starts_none_itself(full: list[int]) -> None:
    before = gc.get_threshold()
    kept: list[list[int]] = []
    while not full and len(kept) < 10_000_000:
        kept.append([])
    assert full, "the control has shown nothing"
    num_kept = len(kept)
    async with _running(_Clock(step_s=0.0)):
        full.clear()
        kept.extend([] for _ in range(2 * num_kept))
        assert not full
    assert gc.get_threshold() == before


async def test_garbage_that_has_become_old_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_collections, "_LOOK_S", 0.0)

    class Old:
        def __init__(self) -> None:
            self.itself = self

    old = Old()
    found = weakref.ref(old)
    gc.collect()
    async with _running(_Clock(step_s=LATEST_S)):
        del old
        while found() is not None:  # the test's own time limit ends it
            for _ in range(_SOME + 1):
                gc.collect(1)
            await asyncio.sleep(0)
    assert found() is None
