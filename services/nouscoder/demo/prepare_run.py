"""`nouscoder prepare-run`: makes the inputs of a run with external services, before the services start.

With `only_problems` it makes only the problem files, for a broker that shares no disk with the learner. The files
depend only on the configuration, so both calls make the same files.

INVARIANT: repeated calls, also after a kill at any point, give the same files. A configuration that differs from that
of the existing files is refused and changes nothing.
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

_LOG_EVERY_S = 5.0


class CannotPrepare(Unusable):
    """The configuration names missing files that this command cannot make. The message names them."""


async def prepare_run(config: Config, *, only_problems: bool) -> None:
    """Make the missing inputs. Raises RunChanged, CannotPrepare, FolderInUse or RunFolderError."""
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
            await asyncio.to_thread(prepare, config, _Progress().report)
            log.info("the run is prepared", extra={"folder": str(folder.path)})
        finally:
            folder.close()


def _only_problems(config: Config) -> None:
    files = [config.in_run_folder(path) for path in (config.problems.train, config.problems.held_out)]
    # The configuration is recorded next to the files, because a changed one would not change existing files.
    record = files[0].with_name(files[0].name + ".made-from.toml")
    refuse_changes(record, config)
    if not all(file.exists() for file in files):
        record.parent.mkdir(parents=True, exist_ok=True)
        write_whole(record, recorded(config).encode())
        write_problems(config)
    log.info("the problem files exist", extra={"files": [str(file) for file in files]})


class _Progress:
    """Logs the first step, the last one, and one every five seconds between them."""

    def __init__(self) -> None:
        self._logged_s = float("-inf")

    def report(self, done: int, total: int, loss: float) -> None:
        now = time.monotonic()
        if done == total or now - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now
            log.info("warm start", extra={"step": done, "steps": total, "loss": round(loss, 4)})


@contextmanager
def _naming_faults() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotPrepare(f"{error.filename or 'a file'} cannot be written: {error.strerror or error}") from error
    except ValueError as error:  # the configuration asks for more problems than exist
        raise CannotPrepare(f"[demo] cannot be prepared: {error}") from error
