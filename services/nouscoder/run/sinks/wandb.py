"""Weights & Biases. Its environment variables say where to: WANDB_PROJECT, WANDB_MODE=offline, WANDB_API_KEY, ...

sinks/wandb of the run folder has the id of its run and the last step that it took. A record may come twice after a kill
between the two; Weights & Biases drops a step that it has.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nouscoder.atomic_files import write_whole


class WandbSink:
    """Logs to one run, over all restarts."""

    def __init__(self, folder: Path, name: str) -> None:
        self._id_file = folder / "run_id"
        self._step_file = folder / "last_step"
        self._folder = folder
        self._name = name
        self._run: Any = None
        self._step = 0

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
            settings=wandb.Settings(console="off", silent=True),
        )
        return self._step

    def write(self, step: int, time_s: float, scalars: Mapping[str, float]) -> None:
        """Log one record."""
        self._run.log({**scalars, "time": time_s}, step=step, commit=True)
        self._step = step

    def flush(self) -> None:
        """Remember the last step. The client of Weights & Biases sends on its own."""
        write_whole(self._step_file, str(self._step).encode())

    def close(self) -> None:
        """Wait until all is sent."""
        self._run.finish()
