"""`nouscoder prepare-run`: makes what a run with external services starts from, before the services start.

With `only_problems` it makes the problem files alone, for a broker that shares no disk with the learner. Both make the
same files, because the files depend on the configuration alone.

INVARIANT: repeated calls, also after a kill at any point, end in the same files. A configuration that does not fit what
was made before is refused and changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from nouscoder.atomic_files import write_whole
from nouscoder.config import Config
from nouscoder.demo.prepare import prepare, write_problems
from nouscoder.errors import Unusable
from nouscoder.run.folder import attach_patiently, recorded, refuse_changes

log = logging.getLogger(__name__)

_TELL_EVERY_S = 5.0


class CannotPrepare(Unusable):
    """The configuration names files that are not there and that nobody can make; the message names them."""


async def prepare_run(config: Config, *, only_problems: bool) -> None:
    """Make what is not there yet. Raises RunChanged, CannotPrepare, FolderInUse or RunFolderError."""
    with _naming_faults():
        if only_problems:
            await asyncio.to_thread(_only_problems, config)
            return
        policy = config.policy.path
        if policy.is_absolute() and not policy.exists():
            raise CannotPrepare(
                f"policy.path {policy} does not exist: only a policy inside the run folder is made here"
            )
        folder = await attach_patiently(config)
        try:
            log.info("preparing the run", extra={"folder": str(folder.path)})
            await asyncio.to_thread(prepare, config, _Progress().tell)
            log.info("the run is prepared", extra={"folder": str(folder.path)})
        finally:
            folder.close()


def _only_problems(config: Config) -> None:
    files = [config.in_run_folder(path) for path in (config.problems.train, config.problems.held_out)]
    # Beside the files stands what made them: a changed configuration would not reach files that are kept.
    record = files[0].with_name(files[0].name + ".made-from.toml")
    refuse_changes(record, config)
    if not all(file.exists() for file in files):
        record.parent.mkdir(parents=True, exist_ok=True)
        write_whole(record, recorded(config).encode())
        write_problems(config)
    log.info("the problems are there", extra={"files": [str(file) for file in files]})


class _Progress:
    """A log line at the first and the last step, and now and then between them."""

    def __init__(self) -> None:
        self._told_s = float("-inf")

    def tell(self, done: int, total: int, loss: float) -> None:
        now = time.monotonic()
        if done == total or now - self._told_s >= _TELL_EVERY_S:
            self._told_s = now
            log.info("warm start", extra={"step": done, "steps": total, "loss": round(loss, 4)})


@contextmanager
def _naming_faults() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotPrepare(f"{error.filename or 'a file'} cannot be written: {error.strerror or error}") from error
    except ValueError as error:  # more problems are asked for than there are
        raise CannotPrepare(f"[demo] cannot be prepared: {error}") from error
