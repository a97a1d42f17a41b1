"""What is said of a run that has ended or was stopped: by status, why-stalled, Ctrl-C, export and every command."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nouscoder.__main__ import main as entry_point
from nouscoder.cli import main
from nouscoder.cli import status as status_command
from nouscoder.cli.status import status_text, why_stalled_text
from nouscoder.config import Config, load_config
from nouscoder.errors import ExitCode, Unusable
from nouscoder.rpc.channel import PeerUnreachable
from nouscoder.run.export import export
from nouscoder.run.folder import RunFolder
from nouscoder.run.loop import interruptible
from nouscoder.run.standing import State, lines_when_stopped, standing_of

SUMMARY = {"steps": 6, "pass_at_1_before": 0.25, "pass_at_1_after": 0.5}


def begun(tmp_path: Path, *values: str, batches: int = 0, summary: dict[str, Any] | None = None) -> Config:
    """The configuration of a run of three batches in a folder that nobody works on."""
    config = load_config(None, [f'run.root="{tmp_path}"', "run.name=tiny", "run.total_batches=3", *values])
    folder = RunFolder.create(config)
    (folder.path / "policy").mkdir()
    for version in range(1, batches + 1):
        (folder.path / "policies" / f"{version:08d}").mkdir(parents=True)
    if summary is not None:
        folder.write_json("summary.json", summary)
    folder.close()
    return config.model_copy(update={"broker": config.broker.model_copy(update={"grpc": "unix:/nowhere.sock"})})


async def both(config: Config) -> list[str]:
    return [await tell(config, as_json=False) for tell in (status_text, why_stalled_text)]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_command, "_PATIENCE_S", 0.0)


async def test_status_and_why_stalled_of_a_stopped_run_say_how_it_goes_on(tmp_path: Path) -> None:
    """They said that the broker had not answered for 3 s."""
    config = begun(tmp_path, batches=2)
    file = tmp_path / "tiny" / "config.toml"
    for text in await both(config):
        assert text.splitlines() == [
            "run tiny was stopped after 2 of 3 batches, and no process works on it",
            f"to go on: nouscoder train {file} --resume",
            f"its curves up to now: nouscoder report {tmp_path}/tiny",
        ]
    assert json.loads(await status_text(config, as_json=True))["state"] == "stopped"
    untrained = begun(tmp_path / "other")
    assert "was stopped before its first batch was trained" in (await both(untrained))[0]


async def test_status_and_why_stalled_of_a_finished_run_say_its_result(tmp_path: Path) -> None:
    config = begun(tmp_path, batches=3, summary=SUMMARY)
    for text in await both(config):
        assert text.splitlines()[0] == "run tiny is finished: 3 of 3 batches, pass@1 0.250 before and 0.500 after"
        assert "--resume --set run.total_batches=6" in text
    found = standing_of(config)
    assert found is not None
    assert (found.state, found.summary) == (State.FINISHED, SUMMARY)


async def test_of_a_run_that_somebody_works_on_or_operates_nothing_is_said(tmp_path: Path) -> None:
    config = begun(tmp_path, batches=2)
    folder, _ = RunFolder.reopen(config.run.folder)
    with pytest.raises(PeerUnreachable, match="does not answer"):
        await status_text(config, as_json=False)
    folder.close()
    assert standing_of(config) is not None
    external = begun(tmp_path / "other", "run.services=external")
    for unknown in (external, load_config(None, [f'run.root="{tmp_path}"', "run.name=none"])):
        assert standing_of(unknown) is None


async def test_of_a_plan_the_stage_is_named_and_the_plan_goes_on(tmp_path: Path) -> None:
    stages = 'plan.stages=[{name="a"}, {name="b"}]'
    config = begun(tmp_path, stages)
    stage = RunFolder.create(config.of_stage(0))
    stage.write_json("summary.json", SUMMARY)
    stage.close()
    (first, second, *_) = (await both(config))[0].splitlines()
    assert first.startswith("run tiny, stage 1 of 2, was stopped")
    assert second == f"to go on: nouscoder train {tmp_path}/tiny/config.toml --resume"


async def test_an_interrupted_command_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def stopped() -> None:
        raise asyncio.CancelledError

    config = begun(tmp_path, batches=1)
    assert await interruptible(stopped(), lines_when_stopped(config)) == ExitCode.INTERRUPTED
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "nouscoder: interrupted"
    assert f"to go on: nouscoder train {tmp_path}/tiny/config.toml --resume" in lines
    (config.run.folder / "policy").rmdir()
    assert lines_when_stopped(config)()[1].startswith(
        "to go on: the command that began it with --resume, and of a demo"
    )
    assert await interruptible(stopped()) == ExitCode.INTERRUPTED
    assert "the same command with --resume goes on where it stopped" in capsys.readouterr().err
    nothing = config.model_copy(update={"run": config.run.model_copy(update={"name": "none"})})
    assert lines_when_stopped(nothing)() == []


def test_ctrl_c_of_an_import_says_that_it_can_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It printed nothing."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules[main.__module__], "show_logs_to_a_person", lambda: None)
    monkeypatch.setattr("nouscoder.data.importers.run.import_files", interrupted)
    monkeypatch.setattr("nouscoder.data.inspect.inspect_file", interrupted)
    for words, said in (
        (["data", "import", "apps", "x.jsonl"], "nouscoder: interrupted; the same command goes on where it stopped"),
        (["data", "inspect", "x.jsonl"], "nouscoder: interrupted"),
    ):
        monkeypatch.setattr(sys, "argv", ["nouscoder", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == ExitCode.INTERRUPTED
        assert capsys.readouterr().err == f"{said}\n"


def test_ctrl_c_while_the_libraries_load_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a traceback."""

    class Loading(ModuleType):
        def __getattr__(self, _: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "nouscoder.cli", Loading("nouscoder.cli"))
    with pytest.raises(SystemExit) as ended:
        entry_point()
    assert (ended.value.code, capsys.readouterr().err) == (ExitCode.INTERRUPTED, "nouscoder: interrupted\n")


def test_the_last_version_of_a_run_that_trained_nothing_is_not_exported_by_chance(tmp_path: Path) -> None:
    config = begun(tmp_path)
    with pytest.raises(Unusable, match=r"has trained nothing yet, .*/tiny/policy; --version 0 exports that one"):
        export(config.run.folder, tmp_path / "out", "last")
