"""The commands of operators against a broker over gRPC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from nouscoder.broker.core import Broker
from nouscoder.broker.process import serve_broker
from nouscoder.cli import operate
from nouscoder.cli.operate import OperationFailed
from nouscoder.cli.status import status_text, why_stalled_text
from nouscoder.config import Config
from nouscoder.domain.run_status import RunMode
from nouscoder.domain.verdict import VerdictKind
from nouscoder.errors import Unusable, WrongUse
from nouscoder.rpc.channel import PeerRefused

NewBroker = Callable[..., Broker]


@dataclass(frozen=True)
class Operated:
    broker: Broker
    config: Config


@pytest.fixture
async def operated(new_broker: NewBroker, broker_rig: Any) -> AsyncIterator[Operated]:
    """A served broker with a policy, and the configuration that names its address."""
    broker = new_broker("broker.grpc=127.0.0.1:0", "broker.max_regrades=1")
    await broker.publish_policy(broker_rig.manifest(0))
    async with AsyncExitStack() as stack:
        address = await serve_broker(broker, broker._config, asyncio.Event(), stack)
        section = broker._config.broker.model_copy(update={"grpc": address})
        yield Operated(broker, broker._config.model_copy(update={"broker": section}))


async def test_a_run_is_paused_and_resumed(operated: Operated) -> None:
    paused = await operate.mode_text(operated.config, RunMode.PAUSED, as_json=True)
    assert json.loads(paused) == {"mode": "paused", "former": "running"}
    assert "policy 0, paused" in await status_text(operated.config, as_json=False)
    assert "`nouscoder resume`" in await why_stalled_text(operated.config, as_json=False)
    (blocker,) = json.loads(await why_stalled_text(operated.config, as_json=True))
    assert blocker["cause"] == "paused"
    again = await operate.mode_text(operated.config, RunMode.PAUSED, as_json=False)
    assert again == "the run was paused already"
    assert await operate.mode_text(operated.config, RunMode.RUNNING, as_json=False) == "the run is running"


async def test_a_drain_waits_until_nothing_is_at_work(operated: Operated, broker_rig: Any) -> None:
    await broker_rig.sample(operated.broker, 4)
    said: list[str] = []
    with pytest.raises(OperationFailed, match="4 rollouts are still sampled or graded after 0 s"):
        await operate.drain_text(operated.config, 0.0, said.append, as_json=False)
    draining = asyncio.create_task(operate.drain_text(operated.config, 60.0, said.append, as_json=False))
    async with asyncio.timeout(60):
        while "4 rollouts are still sampled or graded" not in said:
            await asyncio.sleep(0.02)
    await broker_rig.grade(operated.broker, broker_rig.mixed)
    assert await asyncio.wait_for(draining, 60) == "the run is drained: 4 ready. `nouscoder resume` goes on"


async def test_dead_letters_are_listed_shown_requeued_and_dropped(operated: Operated, broker_rig: Any) -> None:
    broker, config = operated.broker, operated.config
    assert await operate.letters_text(config, as_json=False) == "no dead letters"
    await broker_rig.sample(broker, 4)
    for _ in range(2):
        await broker_rig.grade(broker, lambda _: VerdictKind.INTERNAL_ERROR)
    listed = json.loads(await operate.letters_text(config, as_json=True))
    assert len(listed) == 3  # then the group is too small, and its last rollout is cancelled
    line = (await operate.letters_text(config, as_json=False)).splitlines()[0]
    assert listed[0]["letter_id"] in line
    assert "internal_error" in line
    shown = json.loads(await operate.letter_text(config, listed[0]["letter_id"], as_json=True))
    assert shown["text"] == f"print('{listed[0]['rollout_id']}')"
    assert shown["text"] in await operate.letter_text(config, listed[0]["letter_id"], as_json=False)
    with pytest.raises(Unusable, match="there is no dead letter 1-1"):
        await operate.letter_text(config, "1-1", as_json=False)
    with pytest.raises(WrongUse, match="name dead letters, or give --all"):
        await operate.remove_letters_text(config, [], every=False, requeue=True, as_json=False)
    name = listed[0]["letter_id"]
    dropped = await operate.remove_letters_text(config, [name], every=False, requeue=False, as_json=False)
    assert dropped == "1 dead letters dropped"
    requeued = await operate.remove_letters_text(config, [], every=True, requeue=True, as_json=True)
    assert json.loads(requeued) == {"removed": 2, "requeued_problem_ids": [listed[0]["problem_id"]]}
    (task, *_) = (await broker.lease_tasks("generation-h-0-1", 1, 0)).tasks
    assert task.task.problem_id == listed[0]["problem_id"]


async def test_a_batch_is_dropped_only_when_nobody_trains_on_it(operated: Operated, broker_rig: Any) -> None:
    broker, config = operated.broker, operated.config
    await broker_rig.sample(broker)
    await broker_rig.grade(broker, broker_rig.mixed)
    await broker.lease_batch("learner-1", 0)
    with pytest.raises(PeerRefused, match="a learner is training on batch 0: stop it first"):
        await operate.drop_batch_text(config, 0, as_json=False)
    for _ in range(3):
        await broker.operations.report_batch_failure(0, "loss is NaN")
    answer = json.loads(await operate.drop_batch_text(config, 0, as_json=True))
    assert answer == {"batch_id": 0, "abandoned": 8}
