"""Weights & Biases. Its environment variables say where to: WANDB_PROJECT, WANDB_MODE=offline, WANDB_API_KEY, ...

sinks/wandb of the run folder has the id of its run and the last step that it took. Its client keeps records in memory
and writes them to its file after an interval, and a kill loses what is in memory. So a step is noted only when the file
has it. A record may come twice after a kill between the two; Weights & Biases drops a step that it has.

INVARIANT: every step up to the noted one is in a file of Weights & Biases.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nouscoder.atomic_files import write_whole

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
