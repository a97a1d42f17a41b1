"""Sinks of metrics: each step once and in order over restarts, bounded failures, and real packages (soak).

A package is installed in a folder of the test's own, so that the project's environment stays small.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from nouscoder.config import Config, ConfigError, RunSection, dump_config
from nouscoder.config.run import SinkName
from nouscoder.installation import how_to_install
from nouscoder.run.folder import RunFolder
from nouscoder.run.sinks import follower, targets
from nouscoder.run.sinks.follower import MAX_FAILURES, STATUS, Follower, MetricsTail, SinkFailed, Sinks, open_sinks
from nouscoder.run.sinks.targets import scalars_of


def line(step: int) -> str:
    """A line of metrics.jsonl."""
    record = {
        "step": step,
        "loss": step / 8,
        "skipped": step % 2 == 0,
        "response_length_correct": None,
        "seconds": {"train": 0.5 * step},
        "time": 1_700_000_000.25 + step,
    }
    return json.dumps(record) + "\n"


def write_lines(run: Path, *steps: int, torn: str = "") -> None:
    with (run / "metrics.jsonl").open("a") as output:
        output.write("".join(map(line, steps)) + torn)


class MemorySink:
    """Keeps records; `failing` is how many of the next calls of write raise."""

    def __init__(self, steps: list[int], failing: int = 0) -> None:
        self.steps = steps
        self.failing = failing
        self.scalars: Mapping[str, float] = {}

    def open(self) -> int:
        return max(self.steps, default=0)

    def write(self, step: int, time_s: float, scalars: Mapping[str, float]) -> None:
        if self.failing:
            self.failing -= 1
            raise OSError("the network is away")
        self.steps.append(step)
        self.scalars = scalars

    def amend(self, step: int, time_s: float, scalars: Mapping[str, float]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def follow(sink: MemorySink, run: Path, looks: list[Callable[[], None]]) -> Follower:
    """A follower that calls one of `looks` at each wait; the run ends with the last one."""
    left = list(looks)

    def wait(seconds: float) -> bool:
        if left:
            left.pop(0)()
        return not left

    return Follower(sink, run, run / STATUS, wait)


def test_scalars_are_the_finite_numbers_of_a_record() -> None:
    record = {"a": 1, "b": {"c": 0.5, "d": None}, "e": True, "f": "text", "g": float("nan"), "h": [1]}
    assert scalars_of(record) == {"a": 1.0, "b/c": 0.5, "e": 1.0}


def test_a_tail_has_each_whole_line_once_and_begins_again_when_the_file_got_shorter(tmp_path: Path) -> None:
    tail = MetricsTail(tmp_path / "metrics.jsonl")
    assert tail.new_records() == []
    write_lines(tmp_path, 1, 2, torn=line(3)[:10])
    assert [record["step"] for record in tail.new_records()] == [1, 2]
    write_lines(tmp_path, torn=line(3)[10:])
    assert [record["step"] for record in tail.new_records()] == [3]
    assert tail.new_records() == []
    (tmp_path / "metrics.jsonl").write_text(line(1))
    assert [record["step"] for record in tail.new_records()] == [1]


def test_a_sink_has_each_step_once_over_restarts_and_when_lines_are_written_again(tmp_path: Path) -> None:
    sink = MemorySink([])
    write_lines(tmp_path, 1, 2)

    def learner_restarts() -> None:
        (tmp_path / "metrics.jsonl").write_text(line(1) + line(2))
        write_lines(tmp_path, 3)

    follow(sink, tmp_path, [lambda: write_lines(tmp_path, 3, 4), learner_restarts, lambda: None]).run()
    assert sink.steps == [1, 2, 3, 4]
    assert sink.scalars["seconds/train"] == 2.0
    write_lines(tmp_path, 4, 5, 6)
    again = follow(sink, tmp_path, [lambda: None])
    again.run()
    assert sink.steps == [1, 2, 3, 4, 5, 6]
    assert json.loads((tmp_path / STATUS).read_text()) == {"last_step": 6, "written": 2, "failures": 0}


def test_lines_that_come_with_the_end_of_the_run_are_written(tmp_path: Path) -> None:
    sink = MemorySink([])
    follow(sink, tmp_path, [lambda: write_lines(tmp_path, 1, 2)]).run()
    assert sink.steps == [1, 2]


def test_failures_are_counted_and_the_record_is_tried_again(tmp_path: Path) -> None:
    write_lines(tmp_path, 1, 2, 3)
    sink = MemorySink([], failing=MAX_FAILURES - 1)
    follower = follow(sink, tmp_path, [])
    follower.run()
    assert sink.steps == [1, 2, 3]
    assert follower.status.failures == MAX_FAILURES - 1


def test_a_sink_that_always_fails_is_given_up(tmp_path: Path) -> None:
    write_lines(tmp_path, 1)
    sink = MemorySink([], failing=10**9)
    with pytest.raises(SinkFailed, match="the network is away"):
        follow(sink, tmp_path, []).run()
    assert json.loads((tmp_path / STATUS).read_text())["failures"] == MAX_FAILURES


def config_of(root: Path, *names: str) -> Config:
    return Config(run=RunSection(root=root, name="mine", sinks=tuple(SinkName(name) for name in names)))


def test_a_missing_package_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(targets.PACKAGES, SinkName.WANDB, "no_such_package")
    config = config_of(tmp_path, "wandb")
    sentence = f"run.sinks: wandb is not installed: {how_to_install('wandb')}"
    assert targets.missing_packages(config) == [sentence]
    folder = RunFolder.create(config)
    with pytest.raises(ConfigError) as raised, open_sinks(folder, config, print):
        pass
    folder.close()
    assert str(raised.value) == sentence


def test_a_sink_that_hangs_is_killed_at_the_end_and_one_that_dies_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a sink's process does, the run goes on, and it ends in bounded time."""
    folder = RunFolder.create(config_of(tmp_path))
    monkeypatch.setattr(follower, "_CLOSE_LIMIT_S", 0.5)
    sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]

    def start(sinks: Sinks, name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(sleeping, stdin=subprocess.PIPE)

    monkeypatch.setattr(Sinks, "_start", start)
    sinks = Sinks(folder, ("wandb", "mlflow"))
    assert sinks.look() == []
    os.kill(sinks._processes["mlflow"].pid, signal.SIGKILL)
    sinks._processes["mlflow"].wait(60)
    (warning,) = sinks.look()
    assert warning.startswith("warning: sink mlflow has ended, and the run goes on")
    assert sinks.look() == []
    hanging = sinks._processes["wandb"]
    (late,) = sinks.close()
    assert late.startswith("warning: sink wandb does not have every step")
    assert hanging.poll() is not None
    folder.close()


# ---- real packages ----


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Installs the extra of a sink in a folder beside those of this environment; skips where no package comes."""
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    folders: dict[str, Path] = {}

    def install(name: str) -> Path:
        if name not in folders:
            wanted = {"tensorboard": "tensorboard>=2.18", "wandb": "wandb>=0.18", "mlflow": "mlflow-skinny>=2.20"}[name]
            folder = tmp_path_factory.mktemp(name)
            command = [uv, "pip", "install", "-q", "--python", sys.executable, "--target", str(folder), wanted]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            if done.returncode:
                pytest.skip(f"{wanted} cannot be installed here: {done.stderr[-300:]}")
            folders[name] = folder
        return folders[name]

    return install


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder."""
    config = config_of(tmp_path)
    config.run.folder.mkdir()
    (config.run.folder / "config.toml").write_text(dump_config(config))
    return config.run.folder


def start_follower(name: str, run: Path, packages: Path, **more: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(packages), **more}
    environment.pop("MLFLOW_TRACKING_URI", None)
    command = [sys.executable, "-m", "nouscoder.run.sinks.follower", name, str(run)]
    with (run / "sink.log").open("ab") as log:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)


def wait_for_step(run: Path, name: str, step: int) -> None:
    until, file = time.monotonic() + 300, run / "sinks" / name / STATUS
    while not file.exists() or json.loads(file.read_text())["last_step"] < step:
        assert time.monotonic() < until, (run / "sink.log").read_text()[-3000:]
        time.sleep(0.1)


def end(process: subprocess.Popen[bytes], run: Path) -> None:
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(300) == 0, (run / "sink.log").read_text()[-3000:]


def asked(packages: Path, program: str, *arguments: str) -> Any:
    """What a program that uses the package prints as JSON."""
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    command = [sys.executable, "-W", "ignore", "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


READ_TENSORBOARD = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0, "tensors": 0})
events.Reload()
found = {tag: [[e.step, e.value, e.wall_time] for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
print(json.dumps(found))
"""
READ_MLFLOW = """
import json, os, sys, pathlib
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
from mlflow.tracking import MlflowClient
folder = pathlib.Path(sys.argv[1])
client, run = MlflowClient(tracking_uri=(folder / "mlruns").resolve().as_uri()), (folder / "run_id").read_text()
names = client.get_run(run).data.metrics
history = {n: [[m.step, m.value, m.timestamp / 1000] for m in client.get_metric_history(run, n)] for n in names}
print(json.dumps({n: sorted(found) for n, found in history.items()}))
"""
# A file of Weights & Biases is a log of LevelDB's form: blocks of 32 KiB, and in them pieces of records.
READ_WANDB = """
import json, pathlib, struct, sys
from wandb.proto import wandb_internal_pb2

def records(data):
    at, record = 7, b""  # after the file's own header
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole record, or its last piece
            yield record
            record = b""

found = {}
for file in sorted(pathlib.Path(sys.argv[1]).rglob("*.wandb")):
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            step = int(row.get("_step", record.history.step.num))
            for name, value in row.items():
                found.setdefault(name, []).append([step, value, row["time"]])
        if record.WhichOneof("record_type") == "summary":
            for item in record.summary.update:
                name = "/".join(item.nested_key) or item.key
                if name.startswith("evaluation/"):
                    found[name] = [[None, json.loads(item.value_json)]]
print(json.dumps(found))
"""
READERS = {"tensorboard": READ_TENSORBOARD, "mlflow": READ_MLFLOW, "wandb": READ_WANDB}


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", READERS)
def test_the_real_package_has_each_step_once_after_a_kill_and_a_restart(
    name: str, run: Path, installed: Callable[[str], Path]
) -> None:
    packages = installed(name)
    offline = {"WANDB_MODE": "offline"} if name == "wandb" else {}
    write_lines(run, 1, 2, 3)
    first = start_follower(name, run, packages, **offline)
    wait_for_step(run, name, 3)
    write_lines(run, 4)
    wait_for_step(run, name, 4)
    first.kill()
    first.wait(60)
    write_lines(run, 5, 6)
    second = start_follower(name, run, packages, **offline)
    wait_for_step(run, name, 6)
    # The evaluation of the last policy comes into the last line, which the sink has.
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines[-1] = json.dumps({**json.loads(lines[-1]), "evaluation": {"policy_version": 3, "pass_at_1": 0.75}}) + "\n"
    (run / "metrics.jsonl").write_text("".join(lines))
    end(second, run)
    found = asked(packages, READERS[name], str(run / "sinks" / name))
    steps = list(range(1, 7))
    assert [step for step, *_ in found["loss"]] == steps
    assert [value for _, value, _ in found["loss"]] == [step / 8 for step in steps]
    assert [value for _, value, _ in found["seconds/train"]] == [0.5 * step for step in steps]
    assert [time_s for *_, time_s in found["loss"]] == [1_700_000_000.25 + step for step in steps]
    assert "response_length_correct" not in found
    assert [value for _, value, *_ in found["evaluation/pass_at_1"]] == [0.75]
    if name != "wandb":  # which has it in its summary
        assert [step for step, *_ in found["evaluation/pass_at_1"]] == [6]
