"""`nouscoder runs`: which runs there are, and their removal."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nouscoder.atomic_files import FolderInUse, lock_file
from nouscoder.broker.core import Broker
from nouscoder.broker.sweeper import keep_sweeping
from nouscoder.cli.app import app
from nouscoder.config import Config
from nouscoder.domain.learner_state import TrainedGroups, TrainedState
from nouscoder.errors import Unusable
from nouscoder.learner.state.run_files import open_identity
from nouscoder.run.runs import list_runs, remove_run


@pytest.fixture
def config(broker_rig: Any, tmp_path: Path) -> Config:
    made: Config = broker_rig.config(f"run.root={tmp_path}", f"broker.redis_url={broker_rig.url}")
    return made


async def begin(config: Config, rig: Any) -> TrainedState:
    """A run with a folder, an identity and two groups in flight."""
    config.run.folder.mkdir()
    books = TrainedState(open_identity(config), 0, 0, 0, TrainedGroups(), None)
    broker = Broker(config, rig.url, rig.index)
    await broker.restore_run(books)
    await broker.publish_policy(rig.manifest(0))
    await rig.sample(broker, 8)
    await broker.close()
    return books


async def test_a_run_is_listed_with_both_its_halves(config: Config, broker_rig: Any) -> None:
    books = await begin(config, broker_rig)
    (run,) = [run for run in await list_runs(config) if run.name == config.run.name]
    assert run.in_folder is not None
    assert run.in_redis is not None
    assert run.in_folder.run_id == run.in_redis.run_id == books.identity.run_id
    assert run.belongs_together
    (config.run.folder / "identity.json").write_text(json.dumps({"run_id": "0" * 32}))
    (run,) = [run for run in await list_runs(config) if run.name == config.run.name]
    assert not run.belongs_together


async def test_a_removed_run_is_gone_and_the_others_stay(config: Config, broker_rig: Any) -> None:
    await begin(config, broker_rig)
    other = config.model_copy(update={"run": config.run.model_copy(update={"name": config.run.name + "0"})})
    await begin(other, broker_rig)
    removed = await remove_run(config)
    assert [line.partition(" ")[2] for line in removed[:1]] == [f"keys of the Redis at {broker_rig.url}"]
    assert removed[1] == str(config.run.folder)
    names = [run.name for run in await list_runs(config)]
    assert config.run.name not in names
    assert other.run.name in names
    with pytest.raises(Unusable, match=f"there is no run {config.run.name}"):
        await remove_run(config)


async def test_a_folder_that_is_no_run_is_not_removed(config: Config) -> None:
    config.run.folder.mkdir()
    (config.run.folder / "thesis.tex").write_text("years of work")
    with pytest.raises(Unusable, match="is not a run folder"):
        await remove_run(config)
    assert [file.name for file in config.run.folder.iterdir()] == ["thesis.tex"]


async def test_a_run_that_somebody_works_on_is_not_removed(config: Config, broker_rig: Any) -> None:
    await begin(config, broker_rig)
    with lock_file(config.run.folder / ".lock", "mine"), pytest.raises(FolderInUse, match="stop the run first"):
        await remove_run(config)
    broker = Broker(config, broker_rig.url, broker_rig.index)
    serving = asyncio.create_task(keep_sweeping(broker.store, broker.records, config.broker.lease_s, broker.waits))
    try:
        with pytest.raises(Unusable, match="a broker serves run"):
            await remove_run(config)
    finally:
        broker.waits.end()
        await serving
        await broker.close()
    assert config.run.folder.exists()


def test_the_commands_print_text_and_json(config: Config) -> None:
    config.run.folder.mkdir()
    open_identity(config)
    options = ["--set", f"run.root={config.run.root}"]
    listed = CliRunner().invoke(app, ["runs", "list", *options])
    assert listed.exit_code == 0, listed.output
    assert listed.output == f"{config.run.name}: folder {config.run.folder}, no checkpoint\n"
    as_json = json.loads(CliRunner().invoke(app, ["runs", "list", "--json", *options]).output)
    assert [(run["name"], run["in_redis"], run["belongs_together"]) for run in as_json] == [
        (config.run.name, None, True)
    ]
    assert CliRunner().invoke(app, ["runs", "rm", config.run.name, *options], input="n\n").exit_code == 1
    assert config.run.folder.exists()
    gone = CliRunner().invoke(app, ["runs", "rm", config.run.name, "--yes", "--json", *options])
    assert json.loads(gone.output) == {"removed": [str(config.run.folder)]}
    assert not config.run.folder.exists()
