"""Copies of all runs in run.root, and the way back: `nouscoder runs backup` and `nouscoder runs restore`.

    FOLDER/20261129-030000/NAME/...    run NAME as it was at one instant

A run goes on meanwhile. So all its files are opened, and none is copied yet, between two looks at its folder. When both
see the same, the open files are those of one instant, at which the machine could have crashed: a learner goes on from
that (docs/design/resume-and-kills.md). Logs and Redis' files are left out: the learner's disk says what was trained.

INVARIANT: a folder with the name of a backup is whole and on the disk. A restore removes and changes no run.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import stat
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from nouscoder.atomic_files import (
    flush,
    is_taken,
    link_or_copy,
    lock_file,
    naming_storage_faults,
    remove,
    whole_or_gone,
)
from nouscoder.config import Config
from nouscoder.errors import Unusable
from nouscoder.run.runs import hold, runs_in

_NAME = re.compile(r"\d{8}-\d{6}")
_LEFT_OUT = re.compile(r"redis|sockets|logs|\.lock|\.restored-.*|.*\.part")
_LOOKS, _PAUSE_S = 300, 0.1
_PIECE_BYTES = 8 * 1024**2
Seen = tuple[int, int, int]  # inode, bytes, time of the last change in ns


def backups_in(folder: Path, run: str = "") -> list[Path]:
    """The whole backups, those that hold `run`, the oldest first."""
    return sorted(path for path in folder.glob("*") if _NAME.fullmatch(path.name) and (path / run).is_dir())


def back_up(config: Config, to: Path, keep: int) -> Path:
    """Copy every run of run.root into a new backup, then remove old ones: `keep` stay, and the last of each run.

    Raises Unusable when there is no run, one never stands still or `to` is in run.root; FolderInUse, StorageError.
    """
    root, final = config.run.root.resolve(), to / time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    if to.resolve().is_relative_to(root):
        raise Unusable(f"{to} is in run.root, so each backup would hold those before it: name a folder outside {root}")
    if not (runs := runs_in(root)):
        raise Unusable(f"there is no run in {root} to back up")
    part = to / f"{final.name}.part"
    with naming_storage_faults(final), whole_or_gone(part, to / ".lock"), ExitStack() as stack:
        to.mkdir(parents=True, exist_ok=True)
        stack.enter_context(lock_file(to / ".lock", f"another backup is being made in {to}"))
        for torn in to.glob("*.part"):
            remove(torn)
        earlier = backups_in(to)
        for run in runs:
            _copy_run(root / run, part / run, earlier[-1] / run if earlier else part)
        _name_when_flushed(part, final)
        known: set[tuple[str, str]] = set()
        for index, backup in enumerate(reversed(backups_in(to))):
            here = {(name, run.run_id) for name, run in runs_in(backup).items()}
            if index >= keep and here <= known:  # a run that was lost, and began anew, is still in its last backup
                remove(backup)
            known |= here
    return final


def restore(config: Config, backup: Path, set_aside: str = "") -> str:
    """Make the folder of the run `config.run.name` from a backup. Returns what was done.

    A run that is there gets the name `set_aside`. What was restored from this backup is not restored again. Raises
    Unusable when there is no such backup, or a run and no new name for it; FolderInUse; StorageError.
    """
    run, known = config.run.folder, backups_in(backup.parent, config.run.name)
    steps = {one: runs_in(one)[run.name].step or 0 for one in known}
    if backup not in known:
        there = ", ".join(f"{one.name} (step {step})" for one, step in steps.items()) or "none"
        raise Unusable(f"there is no backup {backup.name} of run {run.name} in {backup.parent}; there are: {there}")
    if set_aside and not re.fullmatch(r"[A-Za-z0-9][\w.-]*", set_aside, re.ASCII):
        raise Unusable(f"{set_aside!r} is not the name of a run: give letters, digits, dots, _ and -")
    aside, part, done = run.parent / set_aside, run.with_name(f"{run.name}.part"), f".restored-{backup.name}"
    here = runs_in(run.parent).get(run.name)
    step = here.step or 0 if here else 0
    is_aside = bool(set_aside) and aside.exists()
    if (run / done).exists() and bool(set_aside) == is_aside:
        return f"{run} was restored from {backup.name} before, and is at step {step} now: nothing is done"
    with naming_storage_faults(run), ExitStack() as stack:
        if is_taken(run):
            if not set_aside or is_aside:
                raise Unusable(
                    f"{run} holds a run at step {step}, and backup {backup.name} is at step {steps[backup]}: give that"
                    " run an unused name by --set-aside, or restore.setAside of the chart"
                )
            hold(run, stack)
        remove(part)
        stack.enter_context(whole_or_gone(part))
        shutil.copytree(backup / run.name, part)
        (part / done).touch()
        if is_taken(run):
            run.rename(aside)
        _name_when_flushed(part, run)
    return f"{run} is restored from {backup.name}, at step {steps[backup]}"


def _name_when_flushed(part: Path, final: Path) -> None:
    for folder, _, files in os.walk(part):
        for name in (*files, "."):
            flush(Path(folder, name))
    part.rename(final)
    flush(final.parent)


def _copy_run(run: Path, to: Path, before: Path) -> None:
    """Copy one instant of a run. Files of the backup `before` are linked, and those that are one file stay one."""
    copies: dict[int, Path] = {}
    with ExitStack() as stack:
        for path, ((inode, num_bytes, changed_ns), file) in _one_instant(run, stack).items():
            place, known = to / path, copies.get(inode, before / path)
            place.parent.mkdir(parents=True, exist_ok=True)
            if known.is_file() and (known.stat().st_size, known.stat().st_mtime_ns) == (num_bytes, changed_ns):
                link_or_copy(known, place)
            else:
                with place.open("xb") as output:  # what was added since belongs to a later instant
                    while num_bytes and (data := file.read(min(num_bytes, _PIECE_BYTES))):
                        num_bytes -= output.write(data)
                if num_bytes:
                    raise Unusable(f"{run / path} was cut off while it was copied: back up again")
            place.chmod(stat.S_IMODE(os.fstat(file.fileno()).st_mode))
            os.utime(place, ns=(changed_ns, changed_ns))
            copies[inode] = place


def _one_instant(run: Path, stack: ExitStack) -> Mapping[Path, tuple[Seen, BinaryIO]]:
    """The files of a run, open, as they were at one instant. Raises Unusable."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for _ in range(_LOOKS):
        with ExitStack() as opened:
            try:
                first = _look(run)
                files = {path: (seen, opened.enter_context((run / path).open("rb"))) for path, seen in first.items()}
                if _look(run) == first:
                    stack.push(opened.pop_all())
                    return files
            except FileNotFoundError:
                pass  # removed meanwhile
        time.sleep(_PAUSE_S)
    raise Unusable(f"the files of {run} changed at each of {_LOOKS} looks: back it up while the learner is stopped")


def _look(run: Path) -> dict[Path, Seen]:
    found = {}
    for folder, folders, names in os.walk(run):
        folders[:] = [name for name in folders if not _LEFT_OUT.fullmatch(name)]
        for path in (Path(folder, name) for name in names if not _LEFT_OUT.fullmatch(name)):
            if path.is_file():
                seen = path.stat()
                found[path.relative_to(run)] = (seen.st_ino, seen.st_size, seen.st_mtime_ns)
    return found
