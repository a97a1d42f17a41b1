"""The runs that a folder and a Redis hold: `nouscoder runs list` and `nouscoder runs rm`.

INVARIANT: nothing of a run is removed while a process works in its folder or a broker serves it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from nouscoder.atomic_files import lock_file
from nouscoder.broker.errors import BrokerError
from nouscoder.broker.redis_address import configured_url
from nouscoder.broker.redis_client import RunInRedis, RunKeys
from nouscoder.config import Config
from nouscoder.errors import Unusable
from nouscoder.learner.state.run_files import FILE, read_run_id


@dataclass(frozen=True, slots=True)
class RunInFolder:
    """A run folder. `run_id` is empty until a learner has started in it; `step` is that of the newest checkpoint."""

    folder: str
    run_id: str
    step: int | None


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run: in a folder, in Redis, or in both."""

    name: str
    in_folder: RunInFolder | None
    in_redis: RunInRedis | None

    @property
    def belongs_together(self) -> bool:
        """Folder and Redis do not hold different runs of one name."""
        ids = {half.run_id for half in (self.in_folder, self.in_redis) if half is not None and half.run_id}
        return len(ids) <= 1


async def list_runs(config: Config) -> list[FoundRun]:
    """The runs in the folder run.root and in the Redis that the configuration names, by name. Raises Unusable."""
    folders, states = runs_in(config.run.root.resolve()), {}
    if url := configured_url(config.broker):
        try:
            async with RunKeys(url) as keys:
                states = {run.name: run for run in await keys.runs()}
        except BrokerError as error:
            raise Unusable(str(error)) from error
    return [FoundRun(name, folders.get(name), states.get(name)) for name in sorted({*folders, *states})]


async def remove_run(config: Config) -> list[str]:
    """Remove the run `config.run.name` from Redis and from the folder. Returns what was removed.

    Raises Unusable when there is no such run, the folder is not a run folder, or a broker serves the run. Raises
    FolderInUse when a process works in its folder.
    """
    removed: list[str] = []
    folder, url = config.run.folder, configured_url(config.broker)
    with ExitStack() as stack:
        if folder.exists():
            if not _is_run(folder):
                raise Unusable(f"{folder} is not a run folder: it has neither config.toml nor {FILE}")
            hold(folder, stack)
        if url:
            try:
                async with RunKeys(url) as keys:
                    if num_keys := await keys.remove(config.run.name):
                        removed.append(f"{num_keys} keys of the Redis at {keys.url}")
            except BrokerError as error:
                raise Unusable(str(error)) from error
        if folder.exists():
            await asyncio.to_thread(shutil.rmtree, folder)
            removed.append(str(folder))
    if not removed:
        raise Unusable(f"there is no run {config.run.name}: `nouscoder runs list` shows which there are")
    return removed


def hold(folder: Path, stack: ExitStack) -> None:
    """Let no other process work in a run folder. Raises FolderInUse."""
    for lock in (folder / ".lock", folder / "checkpoints" / ".lock"):
        lock.parent.mkdir(exist_ok=True)
        stack.enter_context(lock_file(lock, f"a process is working in {folder}: stop the run first"))


def _is_run(folder: Path) -> bool:
    return (folder / "config.toml").exists() or (folder / FILE).exists()


def runs_in(root: Path) -> dict[str, RunInFolder]:
    """The runs in a folder, by name. Raises Unusable."""
    runs = {}
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        if _is_run(folder) and folder.suffix != ".part":
            # Of a plan, those of its last stage come last. A learner renames and removes folders meanwhile, at which
            # Path.glob raises.
            found = sorted(
                (at, name)
                for at, names, _ in os.walk(folder)
                if Path(at).name == "checkpoints"
                for name in names
                if name.isdigit()
            )
            step = int(found[-1][1]) if found else None
            runs[folder.name] = RunInFolder(str(folder), read_run_id(folder / FILE) or "", step)
    return runs
