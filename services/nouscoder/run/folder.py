"""A run folder, runs/NAME: the inputs, outputs and resumable state of a run.

INVARIANT: one process at a time works in a run folder (it holds a lock), and every file is replaced atomically. A new
folder is its user's alone. Passwords in URLs are in files that no other user may read, and Redis' only in redis-url.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nouscoder.atomic_files import (
    FolderInUse,
    StorageError,
    lock_file,
    naming_storage_faults,
    numbered,
    whole_or_gone,
    write_whole,
)
from nouscoder.broker.redis_address import without_password
from nouscoder.config import Config, dump_config, load_config
from nouscoder.errors import Unusable, without_secrets
from nouscoder.private_folder import PRIVATE
from nouscoder.retry import Retry

MIN_FREE_BYTES = 300 * 1024**2
LOCK = ".lock"
POLICIES = "policies"  # the learner writes them


class RunFolderError(Unusable):
    """The run folder cannot be used. The message says why and what to do."""


class RunChanged(RunFolderError):
    """The configuration differs from that of the run in the folder, in a value that a run cannot change."""


# Values that a run cannot change, because earlier samples, verdicts or measurements would not fit later ones.
FIXED = (
    *("run.seed", "problems.train", "problems.held_out", "problems.held_out_share"),
    *("evaluation.problems", "evaluation.samples", "evaluation.seed", "policy.path"),
    *("evaluation.temperature", "evaluation.top_p", "evaluation.top_k", "evaluation.min_p"),
    *("evaluation.max_tokens_total", "evaluation.max_new_tokens"),
    *("broker.group_size", "broker.batch_size", "broker.reward", "learner.steps_per_batch"),
    *("generation.sampling.temperature", "generation.sampling.top_p", "generation.sampling.max_new_tokens"),
    *("generation.max_tokens_total", "policy.router_replay", "broker.records"),
    *("learner.dtype", "learner.optimizer", "learner.optimizer_states", "learner.lora", "learner.compile"),
    "learner.first_checkpoint",
    "generation.environment",
    *("generation.sampling.top_k", "generation.sampling.min_p"),
    *("generation.sampling.stop", "generation.sampling.stop_token_ids"),
    *("demo.train_problems", "demo.held_out_problems", "demo.warm_start_share", "demo.proposal_share"),
)
# Those from which a run of the demo makes its problem files, which another run may train on too.
MADE_FROM = ("run.seed", "demo.problems", "demo.train_problems", "demo.held_out_problems")


class RunFolder:
    """The files of a run. Open it with `create` or `reopen`; `close` releases the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.toml"
        self.summary_file = path / "summary.json"
        self.logs = path / "logs"
        with naming_storage_faults(path):
            self.logs.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(path).free
            if free < MIN_FREE_BYTES:
                raise StorageError(f"the disk of {path} is full: {free >> 20} MiB free, {MIN_FREE_BYTES >> 20} needed")
            in_use = f"another process is working in {path}; give this run another name"
            self._lock = lock_file(path / LOCK, in_use)

    @classmethod
    def create(cls, config: Config) -> RunFolder:
        """Make a run folder with `config`. Raises RunFolderError when a run of that name exists."""
        cls.refuse_existing(config.run.folder)
        with whole_or_gone(config.run.folder):
            with suppress(OSError):  # the constructor says what is wrong
                config.run.folder.mkdir(PRIVATE, parents=True)
            cls._refuse_of_others(config.run.folder)
            folder = cls(config.run.folder)
            folder.record(config)
        return folder

    def record(self, config: Config) -> Config:
        """Write config.toml for the services, and return what it holds. A Redis URL with a password is in redis-url."""
        url = config.broker.redis_url
        if without_password(url) != url:
            file = self.path.resolve() / "redis-url"
            write_whole(file, url.encode(), private=True)
            config = config.changed(broker={"redis_url": "", "redis_url_file": str(file)})
        write_whole(self.config_file, dump_config(config).encode(), private=True)
        return load_config(self.config_file)

    @staticmethod
    def refuse_existing(path: Path) -> None:
        """Raises RunFolderError when the folder holds a run."""
        if (path / "config.toml").exists():
            raise RunFolderError(f"{path} holds a run already: go on with --resume, or give the run another name")

    @staticmethod
    def _refuse_of_others(path: Path) -> None:
        """Raises RunFolderError where other users could write: config.toml names code that the services run."""
        if not path.exists():
            return
        found = path.stat()
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & stat.S_IWOTH:
            raise RunFolderError(f"other users can write to {path}: remove it, or take another run.name or run.root")

    @classmethod
    def reopen(cls, path: Path) -> tuple[RunFolder, Config]:
        """The folder of an earlier run and its configuration. Raises RunFolderError when there is none."""
        if not (path / "config.toml").exists():
            raise RunFolderError(f"there is no run to resume in {path}")
        folder = cls(path)
        return folder, load_config(folder.config_file)

    @classmethod
    def attach(cls, config: Config) -> RunFolder:
        """The folder of a run that gets its configuration at each start; made, with its record, when it is missing.

        An existing record stays: `record_given` replaces it once the changes are taken. Raises RunChanged for changes
        that the run cannot take, FolderInUse, RunFolderError.
        """
        folder = cls(config.run.folder)
        try:
            refuse_changes(folder.config_file, config)
            if not folder.config_file.exists():
                folder.record_given(config)
        except BaseException:
            folder.close()
            raise
        return folder

    def record_given(self, config: Config) -> None:
        """Write config.toml, for people and the next start: external services read their own configuration."""
        write_whole(self.config_file, record_of(config).encode())

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Replace the file `name` atomically."""
        write_whole(self.path / name, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The value that `write_json` wrote, or None."""
        try:
            value: dict[str, Any] = json.loads((self.path / name).read_text(encoding="utf8"))
        except FileNotFoundError:
            return None
        return value

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()


async def attach_patiently(config: Config, patience_s: float = 120.0) -> RunFolder:
    """Like `RunFolder.attach`, but waits while a process that is being replaced still holds the folder."""

    async def attach() -> RunFolder:
        return RunFolder.attach(config)  # not in a thread, which would still take the lock after a cancellation

    return await Retry("opening the run folder", (FolderInUse,), for_s=patience_s, max_wait_s=0.5).call(attach)


def refuse_changes(recorded_file: Path, config: Config) -> None:
    """Raises RunChanged naming the first value of FIXED that differs from the record, if there is a record.

    Of the record of another run's problem files only the values of MADE_FROM count.
    """
    try:
        began_with = tomllib.loads(recorded_file.read_text(encoding="utf8"))
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{recorded_file} cannot be read: {error}") from error
    # Converted to TOML and back, so that both sides have the same types.
    wanted = tomllib.loads(dump_config(config))
    folder = recorded_file.parent
    keys: Sequence[str] = FIXED
    what, way_out = f"the run in {folder} began with", "give the run another run.name"
    if recorded_file.name != "config.toml" and _value(began_with, "run.name") != config.run.name:
        keys = MADE_FROM
        what, way_out = f"the problems in {folder} were made with", "name other files in problems.train"
    for key in keys:
        before, now = _value(began_with, key), _value(wanted, key)
        if before is not None and _differ(before, now):
            raise RunChanged(f"{key} is {now!r}, but {what} {before!r}: put it back, or {way_out}")


def record_of(config: Config) -> str:
    """The configuration as TOML, without passwords. This record is never used to connect to external services."""
    url = without_password(config.broker.redis_url)
    return without_secrets(dump_config(config.changed(broker={"redis_url": url})))


def _differ(before: Any, now: Any) -> bool:
    """Whether the values differ. A key that a newer release has added to a section is no difference, nor is one that it
    has removed and that was off: zero, false or empty.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        if before.get("rank") == now.get("rank") == 0:  # learner.lora that is off: its other keys do nothing
            return False
        return any(_differ(value, now[key]) if key in now else bool(value) for key, value in before.items())
    return bool(before != now)


def _value(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def newest_version(config: Config) -> int:
    """The newest version that the learner has published; 0 when there is none."""
    return max(numbered(config.run.folder / POLICIES), default=0)


def unused_name(root: Path, wanted: str) -> str:
    """`wanted`, or wanted.2, wanted.3, ... when runs of that name exist."""
    name, number = wanted, 1
    while (root / name / "config.toml").exists():
        number += 1
        name = f"{wanted}.{number}"
    return name
