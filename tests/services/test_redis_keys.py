"""docs/redis-keys.md lists every key of a run, with its type."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.services.conftest import BrokerRig

from nouscoder.broker.core import Broker
from nouscoder.domain.learner_state import RunIdentity, TrainedGroups, TrainedState
from nouscoder.domain.partial import EncodedPiece
from nouscoder.domain.verdict import VerdictKind

DOCUMENT = Path(__file__).parents[2] / "docs" / "redis-keys.md"
TYPES = {"sorted set": "zset"}


def documented() -> dict[str, str]:
    """Pattern of a key -> its type in Redis."""
    rows = re.findall(r"^\| `([^`]+)` \| ([a-z ]+) \|", DOCUMENT.read_text(encoding="utf8"), re.M)
    return {re.sub("[A-Z]+", ".+", key): TYPES.get(kind, kind) for key, kind in rows}


async def keys_of(broker: Broker) -> dict[str, str]:
    """Key without the run's prefix -> type, as Redis has them now."""
    redis, prefix = broker.store.redis, broker.store.prefix
    names = [name async for name in redis.scan_iter(match=f"{prefix}*", count=1000)]
    return {_text(name).removeprefix(prefix): _text(await redis.type(name)) for name in names}


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


async def test_the_keys_of_a_run_are_those_of_the_document(
    broker_rig: BrokerRig, new_broker: Callable[..., Broker]
) -> None:
    broker = new_broker("broker.max_regrades=1")
    await broker.restore_run(TrainedState(RunIdentity("ab" * 16, "/runs/test", 0, 4), 0, 0, 0, TrainedGroups(), None))
    await broker.publish_policy(broker_rig.manifest(0))
    seen: dict[str, str] = {}

    async def look() -> None:
        seen.update(await keys_of(broker))

    await broker_rig.sample(broker, 12)
    # The first rollout of each group is given up after two internal errors, the others are graded.
    for _ in range(2):
        await broker_rig.grade(
            broker, lambda name: VerdictKind.INTERNAL_ERROR if name.endswith("-0") else broker_rig.mixed(name)
        )
        await look()
    held = (await broker.lease_tasks("generation-h-0-1", 4, 0)).tasks
    await broker.partials.keep("generation-h-0-1", [EncodedPiece(held[1].lease.lease_id, 0, 1, 0, 0, bytes(48))])
    await broker.heartbeat("generation-h-0-1", [item.lease.lease_id for item in held], [0] * len(held), paused=True)
    letters = await broker.operations.dead_letters()
    await broker.operations.remove_dead_letters([letters[0].letter_id], requeue=True)
    await look()
    leased = await broker.lease_batch("learner-h-0-1", 0)
    assert leased.batch is not None
    await broker.store.run("announce_records", "never-written")
    await look()
    await broker.commit_batch(leased.batch.batch_id, 1)
    await broker.store.run("drop_groups", held[0].task.group_id, held[0].task.problem_id)
    others = (await broker.lease_tasks("generation-h-0-1", 4, 0)).tasks
    await broker.release_leases("generation-h-0-1", [others[0].lease.lease_id], "too long")
    await look()

    patterns = documented()
    unknown = {key for key in seen if not any(re.fullmatch(pattern, key) for pattern in patterns)}
    assert not unknown
    for pattern, kind in patterns.items():
        kinds = {seen[key] for key in seen if re.fullmatch(pattern, key)}
        assert kinds == {kind}, (pattern, kinds, held)
