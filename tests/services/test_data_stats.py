"""`nouscoder data stats`, and the copy of the statistics in the run folder, against a broker over gRPC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.services.conftest import BrokerRig
from typer.testing import CliRunner

from nouscoder.broker.core import Broker
from nouscoder.broker.process import serve_broker
from nouscoder.cli.app import app
from nouscoder.cli.data import stats_text
from nouscoder.cli.status import broker_of
from nouscoder.config import Config
from nouscoder.data.pass_rates import PassCount, read_pass_rates
from nouscoder.domain.curriculum import CurriculumState
from nouscoder.domain.learner_state import RunIdentity, TrainedGroups, TrainedState
from nouscoder.errors import Unusable
from nouscoder.learner.state.curriculum_copy import FILE, CurriculumCopy, read_copy
from nouscoder.rpc.channel import PeerUnreachable


@pytest.fixture
async def served(
    new_broker: Callable[..., Broker], broker_rig: BrokerRig, tmp_path: Path
) -> AsyncIterator[tuple[Broker, Config]]:
    """A served broker with two complete groups, and the configuration that names its address and folder."""
    broker = new_broker("broker.grpc=127.0.0.1:0", f"run.root={tmp_path}", "broker.pipeline_k=4")
    await broker.publish_policy(broker_rig.manifest(0))
    await broker_rig.sample(broker, 8)
    await broker_rig.grade(broker, broker_rig.mixed)
    async with AsyncExitStack() as stack:
        address = await serve_broker(broker, broker._config, asyncio.Event(), stack)
        section = broker._config.broker.model_copy(update={"grpc": address})
        broker._config.run.folder.mkdir()
        yield broker, broker._config.model_copy(update={"broker": section})


async def test_the_statistics_of_a_run_are_a_table_and_a_file_of_pass_rates(
    served: tuple[Broker, Config], tmp_path: Path
) -> None:
    broker, config = served
    records = (await broker.read_curriculum()).problems
    text = await stats_text(config, live=True, limit=1, as_json=False)
    assert "2 problems with complete groups, curriculum at place 2\n2 groups, 0 filtered; 8 rollouts graded, 4" in text
    head, row = text.splitlines()[-2:]
    assert head.split("  ")[0] == "problem"
    assert row.split() == [min(record.problem_id for record in records), *["1", "0", "4", "2", "0.500", "0", "2/4"]]
    rates = tmp_path / "rates.json"
    rates.write_text(await stats_text(config, live=True, limit=1, as_json=True))
    assert read_pass_rates(rates) == {record.problem_id: PassCount(2, 4) for record in records}
    other = config.model_copy(update={"run": config.run.model_copy(update={"name": "another"})})
    with pytest.raises(Unusable, match="not another"):
        await stats_text(other, live=True, limit=0, as_json=False)


async def test_the_copy_is_what_a_wiped_redis_gets_back(served: tuple[Broker, Config], broker_rig: BrokerRig) -> None:
    broker, config = served
    state = await broker.read_curriculum()
    async with broker_of(config) as client:
        copy = CurriculumCopy(config.run.folder, client)
        assert await copy.state() == CurriculumState()
        await copy.after_batch()
        assert await copy.state() == state
        await broker_rig.sample(broker, 4)
        await broker_rig.grade(broker, broker_rig.mixed)
        await copy.after_batch()
        assert await copy.state() == state, "the next copy comes a minute later"
        async for key in broker.store.redis.scan_iter(match=f"{broker.store.prefix}*", count=1000):
            await broker.store.redis.delete(key)
        identity = RunIdentity("ab" * 16, "/runs/test", 0, 4)
        await client.restore_run(
            TrainedState(identity, 0, 0, 0, TrainedGroups(), broker_rig.manifest(0), curriculum=await copy.state())
        )
        assert set((await broker.read_curriculum()).problems) == set(state.problems)


async def test_without_a_broker_the_copy_is_shown_and_a_damaged_one_stops_nothing_but_this(
    served: tuple[Broker, Config],
) -> None:
    _, config = served
    async with broker_of(config) as client:
        copy = CurriculumCopy(config.run.folder, client)
        await copy.now()
        arguments = ["data", "stats", config.run.name, "--set", f"run.root={config.run.root}", "--json"]
        answer = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert answer.exit_code == 0, answer.output
        assert len(json.loads(answer.output)) == 2
        (config.run.folder / "config.toml").write_text('[run]\nname = "another"\nroot = "elsewhere"\n')
        arguments = ["data", "stats", str(config.run.folder), "--json"]
        by_folder = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert by_folder.output == answer.output
        file = config.run.folder / FILE
        file.write_text('{"cursor": 1, "problems": {"p0": "1 2"}}')
        with pytest.raises(Unusable, match="not a record"):
            await stats_text(config, live=False, limit=0, as_json=False)
        assert await copy.state() == CurriculumState()
        file.unlink()
        assert read_copy(file) is None
    away = config.model_copy(update={"broker": config.broker.model_copy(update={"grpc": "127.0.0.1:1"})})
    with pytest.raises(PeerUnreachable):
        await stats_text(away, live=False, limit=0, as_json=False)


def test_a_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    """It said that the broker had not answered for 0 s."""
    given = ["--set", f"run.root={tmp_path}", "--set", "broker.grpc=127.0.0.1:1"]
    answer = CliRunner().invoke(app, ["data", "stats", "unknown", *given])
    said = str(answer.exception)
    assert f"no run unknown is in {tmp_path}/" in said
    assert "0 s" not in said
    assert list(tmp_path.iterdir()) == []
