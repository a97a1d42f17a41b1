"""A run folder, runs/NAME: the inputs, outputs and resumable state of a run.

INVARIANT: one process at a time works in a run folder (it holds a lock), and every file is replaced atomically. A new
folder is its user's alone. Passwords in URLs are in files that no other user may read, and Redis' only in redis-url.

INVARIANT of `standing_of`: of a run that a process works on nothing is said, and nothing is written to any folder.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
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
from nouscoder.domain.plan import Evaluated
from nouscoder.domain.run_status import Ledger
from nouscoder.errors import Unusable, without_secrets
from nouscoder.input_file import json_object
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


# The figures of a finished run: summary.json, and the last lines on the screen.


@dataclass(frozen=True, slots=True)
class RunSummary:
    """summary.json. `learning_seconds` counts from the start of the command; a resumed run adds its earlier time."""

    name: str
    seed: int
    steps: int
    pass_at_1_before: float
    pass_at_1_after: float
    learning_seconds: float
    ledger: Ledger
    balanced: bool


def summarize(
    config: Config, before: Evaluated, after: Evaluated, learning_seconds: float, ledger: Ledger
) -> RunSummary:
    """The summary of a run with these evaluations of its first and last policy."""
    return RunSummary(
        name=config.run.name,
        seed=config.run.seed,
        steps=after.policy_version * config.learner.steps_per_batch,
        pass_at_1_before=before.pass_at_1,
        pass_at_1_after=after.pass_at_1,
        learning_seconds=round(learning_seconds, 1),
        ledger=ledger,
        balanced=ledger.balanced,
    )


def closing_lines(summary: RunSummary, report: Path) -> list[str]:
    """The last lines on the screen after the run."""
    gain = summary.pass_at_1_after - summary.pass_at_1_before
    return [
        f"pass@1 on held-out problems: {summary.pass_at_1_before:.3f} before, {summary.pass_at_1_after:.3f} after"
        f" {summary.steps} steps ({gain:+.3f})",
        f"ledger {'balanced' if summary.balanced else 'NOT BALANCED'}; {summary.learning_seconds:.0f} s in all",
        f"report: {report}",
    ]


# How a run stands while no process works on it: finished, or stopped, and how it goes on.


class State(StrEnum):
    """STOPPED -> (train --resume) -> FINISHED; a finished run goes on with more batches."""

    STOPPED = "stopped"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Standing:
    """`batches` of `total_batches` are trained. `summary` is that of a finished run. `stage` is "" but in a plan."""

    run: str
    folder: str
    state: State
    batches: int
    total_batches: int
    go_on: str
    stage: str = ""
    summary: dict[str, Any] | None = None

    @property
    def lines(self) -> list[str]:
        """For a person."""
        run = f"run {self.run}" + (f", {self.stage}," if self.stage else "")
        batches = f"{self.batches} of {self.total_batches} batches"
        if self.summary is not None:
            before, after = (self.summary[f"pass_at_1_{when}"] for when in ("before", "after"))
            return [
                f"{run} is finished: {batches}, pass@1 {before:.3f} before and {after:.3f} after",
                f"its report: {self.folder}/report.html; to train on, resume it with more run.total_batches:",
                f"  {self.go_on} --set run.total_batches={2 * max(1, self.total_batches)}",
            ]
        done = f"after {batches}" if self.batches else "before its first batch was trained"
        shown = [f"its curves up to now: nouscoder report {shlex.quote(self.folder)}"] if self.batches else []
        return [f"{run} was stopped {done}, and no process works on it", f"to go on: {self.go_on}", *shown]


def standing_of(config: Config) -> Standing | None:
    """How the run stands; None when there is none of its name, or when a process may work on it."""
    folder = config.run.folder
    if not (folder / "config.toml").is_file() or _is_worked_on(folder):
        return None
    found = standing(config)
    # Services that somebody else operates are not stopped because they do not answer.
    return found if found.state is State.FINISHED or config.run.services == "local" else None


def standing(config: Config) -> Standing:
    """How the run stands in its folder, whoever works on it. Of a plan it is the last stage that was begun."""
    run, stage, name = config, "", config.run.name
    folder = config.run.folder
    for index in range(len(config.plan.stages)):
        if (config.of_stage(index).run.folder / "config.toml").is_file():
            run, stage = config.of_stage(index), f"stage {index + 1} of {len(config.plan.stages)}"
    summary = _summary(run.run.folder)
    is_last = not config.plan.stages or stage.startswith(f"stage {len(config.plan.stages)} ")
    finished = summary is not None and is_last
    go_on = f"nouscoder train {shlex.quote(_shown(folder / 'config.toml'))} --resume"
    if not config.plan.stages and not config.in_run_folder(config.policy.path).exists():
        go_on = f"the command that began it with --resume, and of a demo --name {name}: its policy is not made yet"
    return Standing(
        run=name,
        folder=_shown(run.run.folder),
        state=State.FINISHED if finished else State.STOPPED,
        batches=newest_version(run),
        total_batches=run.run.total_batches,
        go_on=go_on,
        stage=stage,
        summary=summary if finished else None,
    )


def lines_when_stopped(config: Config) -> Callable[[], list[str]]:
    """What a command says that was interrupted: how the run goes on."""

    def lines() -> list[str]:
        if not (config.run.folder / "config.toml").is_file() or config.run.services != "local":
            return []  # nothing was begun, or the run goes on by itself
        return standing(config).lines

    return lines


def _is_worked_on(folder: Path) -> bool:
    try:
        lock_file(folder / LOCK, "").close()
    except (FolderInUse, OSError):  # a folder of another user cannot be asked
        return True
    return False


def _summary(folder: Path) -> dict[str, Any] | None:
    record = json_object(folder / "summary.json")
    return record if "pass_at_1_after" in record else None


def _shown(path: Path) -> str:
    """From the working directory, where it is below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
