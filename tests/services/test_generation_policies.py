"""Policies that come while another is loaded: the newest is next, and an older one only if that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from nouscoder.domain.policy import PolicyManifest, Shard
from nouscoder.generation.engines.base import Engine, EngineError
from nouscoder.generation.errors import PolicyUnusable
from nouscoder.generation.policies import Policies


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


class NoFiles:
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
