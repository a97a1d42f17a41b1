"""A run folder, runs/NAME: what a run is given, what it writes, and what a resumed run finds again.

INVARIANT: one process at a time works in a run folder (it holds a lock), and every file is replaced whole.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

from nouscoder.config import Config, dump_config, load_config
from nouscoder.errors import NousCoderError

MIN_FREE_BYTES = 300 * 1024**2


class RunFolderError(NousCoderError):
    """The run folder cannot be used; the message says why and what to do."""


class RunFolder:
    """The files of a run. Open with `create` or `reopen`; close to let the lock go."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.toml"
        self.summary_file = path / "summary.json"
        self.logs = path / "logs"
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(path).free
            self._lock = (path / ".lock").open("w")
        except OSError as error:
            raise RunFolderError(f"{path} cannot be written: {error.strerror}") from error
        if free < MIN_FREE_BYTES:
            raise RunFolderError(f"the disk of {path} is full: {free >> 20} MiB free, {MIN_FREE_BYTES >> 20} needed")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise RunFolderError(f"another process is working in {path}; give this run another name") from None

    @classmethod
    def create(cls, config: Config) -> RunFolder:
        """A new run folder holding `config`. Raises RunFolderError when there is a run of that name."""
        path = config.run.folder
        if (path / "config.toml").exists():
            raise RunFolderError(f"{path} holds a run already: go on with --resume, or give another --name")
        folder = cls(path)
        folder.write_text(folder.config_file, dump_config(config))
        return folder

    @classmethod
    def reopen(cls, path: Path) -> tuple[RunFolder, Config]:
        """The folder of an earlier run and its configuration. Raises RunFolderError when there is none."""
        if not (path / "config.toml").exists():
            raise RunFolderError(f"there is no run to resume in {path}")
        folder = cls(path)
        return folder, load_config(folder.config_file)

    def write_text(self, file: Path, text: str) -> None:
        """Replace `file` whole, durably."""
        temporary = file.with_name(file.name + ".part")
        with temporary.open("w", encoding="utf8") as output:
            output.write(text)
            output.flush()
            os.fsync(output.fileno())
        temporary.replace(file)

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Replace `name` whole."""
        self.write_text(self.path / name, json.dumps(value, indent=1, ensure_ascii=False) + "\n")

    def read_json(self, name: str) -> dict[str, Any] | None:
        """What `write_json` wrote, or None."""
        try:
            value: dict[str, Any] = json.loads((self.path / name).read_text(encoding="utf8"))
        except FileNotFoundError:
            return None
        return value

    def close(self) -> None:
        """Let the lock go."""
        self._lock.close()


def unused_name(root: Path, wanted: str) -> str:
    """`wanted`, or wanted.2, wanted.3, ... when runs of that name exist."""
    name, number = wanted, 1
    while (root / name / "config.toml").exists():
        number += 1
        name = f"{wanted}.{number}"
    return name
