"""The sinks by name, the package that each needs, and where it keeps its files. A package is imported late.

TensorBoard: event files in sinks/tensorboard of the run folder (`tensorboard --logdir runs`). A record is one event
with all its scalars, which is in the file as a whole or not at all, so the files themselves say which step is the last
one.

Weights & Biases: its environment variables say where to, such as WANDB_PROJECT, WANDB_MODE=offline, WANDB_API_KEY.
sinks/wandb of the run folder has the id of its run and the last step that it took. Its client keeps records in memory
and writes them to its file after an interval, and a kill loses what is in memory. So a step is noted only when the file
has it. A record may come twice after a kill between the two; Weights & Biases drops a step that it has.
INVARIANT: every step up to the noted one is in a file of Weights & Biases.

MLflow: MLFLOW_TRACKING_URI names the server, else sinks/mlflow of the run folder is a file store.
MLFLOW_EXPERIMENT_NAME names the experiment (default: nouscoder). The metric `step` is the last one of each record, so
the server says which record it has as a whole. A metric that is sent again has the same time, step and value.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from nouscoder.atomic_files import write_whole
from nouscoder.config import Config
from nouscoder.config.run import SinkName
from nouscoder.installation import how_to_install


class Sink(Protocol):
    """Where the records of a run go. One process uses it, and calls `open` first. Every call may raise anything."""

    def open(self) -> int:
        """Connect, and return the last step whose whole record the sink has; 0 when it has none."""

    def write(self, step: int, time_s: float, scalars: Mapping[str, float]) -> None:
        """Take one record. `time_s` is when the learner wrote it, in seconds since 1970."""

    def amend(self, step: int, time_s: float, scalars: Mapping[str, float]) -> None:
        """Add scalars to a record that was written. It may come again after a restart, with the same scalars."""

    def flush(self) -> None:
        """Make the records that were written durable, as far as the tool allows."""

    def close(self) -> None:
        """Flush and disconnect."""


def scalars_of(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers of a record by name. A number of an inner record is named `outer/inner`, a flag is 0 or 1."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found |= scalars_of(value, f"{prefix}{name}/")
        elif isinstance(value, (bool, int, float)) and math.isfinite(value):
            found[f"{prefix}{name}"] = float(value)
    return found


class TensorBoardSink:
    """Writes event files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def open(self) -> int:
        """Read the last step of earlier files, and begin a new file."""
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        steps = [
            event.step
            for file in sorted(self._folder.glob("events.out.tfevents.*"))
            for event in LegacyEventFileLoader(str(file)).Load()
            if event.HasField("summary")
        ]
        self._writer = EventFileWriter(str(self._folder))
        return max(steps, default=0)

    def write(self, step: int, time_s: float, scalars: Mapping[str, float]) -> None:
        """Add one event."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._writer.add_event(Event(wall_time=time_s, step=step, summary=Summary(value=values)))

    amend = write  # a further event of the same step

    def flush(self) -> None:
        """Write what is buffered to the file."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


_WRITE_EVERY_S = 0.2  # 15 s by default
_WRITE_LIMIT_S = 60.0


class WandbSink:
    """Logs to one run, over all restarts."""

    def __init__(self, folder: Path, name: str) -> None:
        self._id_file = folder / "run_id"
        self._step_file = folder / "last_step"
        self._folder = folder
        self._name = name
        self._run: Any = None
        self._step = 0
        self._file = Path()
        self._size = -1  # of the file, before the first record that is not noted

    def open(self) -> int:
        """Begin the run, or go on with it."""
        import wandb

        if not self._id_file.exists():
            write_whole(self._id_file, secrets.token_hex(4).encode())
        self._step = int(self._step_file.read_text()) if self._step_file.exists() else 0
        self._run = wandb.init(
            id=self._id_file.read_text(),
            name=self._name,
            project=os.environ.get("WANDB_PROJECT", "nouscoder"),
            dir=str(self._folder),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, x_transaction_log_flush_interval=_WRITE_EVERY_S),
        )
        self._file = Path(self._run.settings.sync_file)
        return self._step

    def write(self, step: int, time_s: float, scalars: Mapping[str, float]) -> None:
        """Log one record."""
        if self._size < 0:
            self._size = self._file_size()
        self._run.log({**scalars, "time": time_s}, step=step, commit=True)
        self._step = step

    def amend(self, step: int, time_s: float, scalars: Mapping[str, float]) -> None:
        """Write to the summary of the run: a step that was logged takes no more values."""
        self._run.summary.update(dict(scalars))

    def flush(self) -> None:
        """Remember the last step, as soon as the file has it. Raises TimeoutError."""
        if self._size < 0:
            return
        until_s = time.monotonic() + _WRITE_LIMIT_S
        while self._file_size() <= self._size:
            if time.monotonic() > until_s:
                raise TimeoutError(f"{self._file} did not grow within {_WRITE_LIMIT_S:.0f} s")
            time.sleep(_WRITE_EVERY_S)
        # The client may have written the first of several records only.
        time.sleep(2 * _WRITE_EVERY_S)
        self._size = -1
        write_whole(self._step_file, str(self._step).encode())

    def close(self) -> None:
        """Wait until all is sent."""
        self._run.finish()

    def _file_size(self) -> int:
        return self._file.stat().st_size if self._file.exists() else 0


_STEP = "step"


class MlflowSink:
    """Logs to one run of MLflow, over all restarts. sinks/mlflow of the run folder has its id."""

    def __init__(self, folder: Path, name: str) -> None:
        self._id_file = folder / "run_id"
        self._store = folder / "mlruns"
        self._name = name
        self._client: Any = None
        self._run_id = ""

    def open(self) -> int:
        """Find or make experiment and run."""
        # MLflow 3.17 opens a file store only where this is set. A database needs a package that is not light.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(
            tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or self._store.resolve().as_uri()
        )
        if not self._id_file.exists():
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "nouscoder")
            known = self._client.get_experiment_by_name(experiment)
            number = known.experiment_id if known is not None else self._client.create_experiment(experiment)
            made = self._client.create_run(number, run_name=self._name)
            write_whole(self._id_file, made.info.run_id.encode())
        self._run_id = self._id_file.read_text()
        return int(self._client.get_run(self._run_id).data.metrics.get(_STEP, 0))

    def write(self, step: int, time_s: float, scalars: Mapping[str, float]) -> None:
        """Log one record in one call."""
        self.amend(step, time_s, {**{name: value for name, value in scalars.items() if name != _STEP}, _STEP: step})

    def amend(self, step: int, time_s: float, scalars: Mapping[str, float]) -> None:
        """Log more metrics of a step."""
        from mlflow.entities import Metric

        metrics = [Metric(name, value, int(1000 * time_s), step) for name, value in scalars.items()]
        self._client.log_batch(self._run_id, metrics=metrics, synchronous=True)

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """End the run of MLflow. A resumed run logs to it again."""
        self._client.set_terminated(self._run_id)


# The package that each sink imports; the extra of the same name as the sink installs it.
PACKAGES = {SinkName.TENSORBOARD: "tensorboard", SinkName.WANDB: "wandb", SinkName.MLFLOW: "mlflow"}


def missing_packages(config: Config) -> list[str]:
    """A sentence for each sink of the run whose package is not installed."""
    return [
        f"run.sinks: {name} is not installed: {how_to_install(name)}"
        for name in config.run.sinks
        if find_spec(PACKAGES[name]) is None
    ]


def sink_folder(run: Path, name: str) -> Path:
    """Where a sink keeps its files, in the run folder."""
    return run / "sinks" / name


def open_sink(name: str, config: Config, folder: Path) -> Sink:
    """The sink of this name. Imports its module, which imports its package only in `open`."""
    if name == SinkName.TENSORBOARD:
        return TensorBoardSink(folder)
    if name == SinkName.WANDB:
        return WandbSink(folder, config.run.name)
    return MlflowSink(folder, config.run.name)
