"""MLflow. MLFLOW_TRACKING_URI names the server, else sinks/mlflow of the run folder is a file store.

MLFLOW_EXPERIMENT_NAME names the experiment (default: nouscoder). The metric `step` is the last one of each record, so
the server says which record it has as a whole. A metric that is sent again has the same time, step and value.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nouscoder.atomic_files import write_whole

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
        from mlflow.entities import Metric

        others = {name: value for name, value in scalars.items() if name != _STEP}
        metrics = [Metric(name, value, int(1000 * time_s), step) for name, value in [*others.items(), (_STEP, step)]]
        self._client.log_batch(self._run_id, metrics=metrics, synchronous=True)

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """End the run of MLflow. A resumed run logs to it again."""
        self._client.set_terminated(self._run_id)
