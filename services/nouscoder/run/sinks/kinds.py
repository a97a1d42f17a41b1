"""The sinks by name, the package that each needs, and where it keeps its files. A sink's module is imported late."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from nouscoder.config import Config
from nouscoder.config.run import SinkName
from nouscoder.run.sinks.base import Sink

# The package that each sink imports; the extra of the same name as the sink installs it.
PACKAGES = {SinkName.TENSORBOARD: "tensorboard", SinkName.WANDB: "wandb", SinkName.MLFLOW: "mlflow"}


def missing_packages(config: Config) -> list[str]:
    """A sentence for each sink of the run whose package is not installed."""
    return [
        f"run.sinks: {name} is not installed: pip install nouscoder[{name}]"
        for name in config.run.sinks
        if find_spec(PACKAGES[name]) is None
    ]


def sink_folder(run: Path, name: str) -> Path:
    """Where a sink keeps its files, in the run folder."""
    return run / "sinks" / name


def open_sink(name: str, config: Config, folder: Path) -> Sink:
    """The sink of this name. Imports its module, which imports its package only in `open`."""
    if name == SinkName.TENSORBOARD:
        from nouscoder.run.sinks.tensorboard import TensorBoardSink

        return TensorBoardSink(folder)
    if name == SinkName.WANDB:
        from nouscoder.run.sinks.wandb import WandbSink

        return WandbSink(folder, config.run.name)
    from nouscoder.run.sinks.mlflow import MlflowSink

    return MlflowSink(folder, config.run.name)
