"""How a run stands while no process works on it: finished, or stopped, and how it goes on.

INVARIANT of `standing_of`: of a run that a process works on nothing is said, and nothing is written to any folder.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from nouscoder.atomic_files import FolderInUse, lock_file
from nouscoder.config import Config
from nouscoder.input_file import json_object
from nouscoder.run.folder import LOCK, newest_version


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
