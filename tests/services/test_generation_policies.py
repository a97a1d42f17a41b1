"""Policies that come while another is loaded: the newest is next, and an older one only if that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from nouscoder.domain.policy import PolicyManifest, Shard
from nouscoder.generation.engines.base import Engine, EngineError
from nouscoder.generation.weights.errors import PolicyGone, PolicyRefused, PolicyUnusable
from nouscoder.generation.weights.policies import Policies
from nouscoder.generation.weights.source import FolderSource


class SlowEngine:
    """Loads one policy at a time; a load ends when the test says so."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.broken: set[int] = set()
        self._go_on = asyncio.Semaphore(0)

    async def load_policy(self, files: Sequence[Path], policy_version: int) -> float:
        self.begun.append(policy_version)
        await self._go_on.acquire()
        if policy_version in self.broken:
            raise EngineError(f"version {policy_version} is broken")
        return 0.1

    async def end_load(self) -> None:
        self._go_on.release()
        await settled()


class NoFiles(FolderSource):
    async def files_of(self, manifest: PolicyManifest) -> tuple[Path, ...]:
        return ()


def manifest_of(version: int) -> PolicyManifest:
    return PolicyManifest(version, version, "/policies", (Shard("a.safetensors", f"{version:064x}", 1),))


async def settled() -> None:
    """Let every task run until it waits."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.fixture
def engine() -> SlowEngine:
    return SlowEngine()


async def begin(engine: SlowEngine, versions: Sequence[int]) -> tuple[Policies, dict[int, asyncio.Task[Any]]]:
    policies = Policies(cast(Engine, engine), NoFiles())
    tasks = {}
    for version in versions:
        tasks[version] = asyncio.create_task(policies.follow(manifest_of(version)))
        await settled()
    return policies, tasks


async def test_of_the_policies_that_come_during_an_update_only_the_newest_is_loaded(engine: SlowEngine) -> None:
    policies, tasks = await begin(engine, [1, 2, 4, 3])
    assert engine.begun == [1]
    await engine.end_load()
    assert engine.begun == [1, 4]
    await engine.end_load()
    assert {version: await task for version, task in tasks.items()} == {1: True, 2: False, 3: False, 4: True}
    assert policies.current == manifest_of(4)
    assert engine.begun == [1, 4]


async def test_when_the_newest_fails_the_next_older_one_is_loaded(engine: SlowEngine) -> None:
    engine.broken = {4}
    policies, tasks = await begin(engine, [1, 2, 4, 3])
    for _ in range(3):
        await engine.end_load()
    with pytest.raises(PolicyUnusable, match="version 4 is broken"):
        await tasks[4]
    assert (await tasks[3], await tasks[2]) == (True, False)
    assert policies.current == manifest_of(3)
    assert engine.begun == [1, 4, 3]


async def test_a_caller_that_gives_up_lets_the_others_go_on(engine: SlowEngine) -> None:
    policies, tasks = await begin(engine, [1, 2, 3])
    tasks[3].cancel()
    await settled()
    await engine.end_load()
    assert engine.begun == [1, 2]
    await engine.end_load()
    assert await tasks[2]
    assert policies.current == manifest_of(2)


async def test_newer_policies_wait_while_one_is_pinned_and_the_newest_is_loaded_then(engine: SlowEngine) -> None:
    policies, tasks = await begin(engine, [1])
    await engine.end_load()
    async with policies.pinned(1, limit_s=60):
        for version in (2, 4, 3):
            tasks[version] = asyncio.create_task(policies.follow(manifest_of(version)))
        await settled()
        assert (engine.begun, policies.is_pinned) == ([1], True)
    await settled()
    assert (engine.begun, policies.is_pinned) == ([1, 4], False)
    await engine.end_load()
    assert {version: await task for version, task in tasks.items()} == {1: True, 2: False, 3: False, 4: True}


async def test_a_policy_that_was_about_to_be_loaded_waits_for_the_end_of_all_pins(engine: SlowEngine) -> None:
    policies, tasks = await begin(engine, [1, 2])
    async with AsyncExitStack() as pins:
        first = asyncio.create_task(pins.enter_async_context(policies.pinned(1, limit_s=60)))
        await settled()
        await engine.end_load()
        await first
        async with policies.pinned(1, limit_s=60):
            pass
        await settled()
        assert engine.begun == [1]
    await settled()
    assert engine.begun == [1, 2]
    await engine.end_load()
    assert await tasks[2]


async def test_only_the_version_in_use_can_be_pinned(engine: SlowEngine) -> None:
    policies, tasks = await begin(engine, [2])
    pinning = asyncio.create_task(policies.pinned(1, limit_s=60).__aenter__())
    await settled()
    assert not pinning.done(), "it waits for the load"
    await engine.end_load()
    with pytest.raises(PolicyRefused, match="version 1 is not in use: version 2 is"):
        await pinning
    assert await tasks[2]
    assert not policies.is_pinned


async def test_a_pin_ends_at_its_limit(engine: SlowEngine) -> None:
    policies, tasks = await begin(engine, [1])
    await engine.end_load()
    async with policies.pinned(1, limit_s=0.05):
        tasks[2] = asyncio.create_task(policies.follow(manifest_of(2)))
        async with asyncio.timeout(60):
            while engine.begun != [1, 2]:
                await asyncio.sleep(0.01)
        await engine.end_load()
        assert await tasks[2]


async def test_a_folder_that_the_learner_removed_is_gone_and_not_broken(tmp_path: Path) -> None:
    shard = Shard("a.safetensors", "0" * 64, 1)
    with pytest.raises(PolicyGone, match="the learner has removed it"):
        await FolderSource().files_of(PolicyManifest(7, 7, str(tmp_path / "7"), (shard,)))
    with pytest.raises(PolicyUnusable, match="cannot be read") as found:
        await FolderSource().files_of(PolicyManifest(0, 0, str(tmp_path / "0"), (shard,)))
    assert not isinstance(found.value, PolicyGone)
