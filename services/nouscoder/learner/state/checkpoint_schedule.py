"""Decides when to write checkpoints: every n batches or t seconds in the background, and at once on request.

An evaluation asks for the checkpoint of the policy that it will measure (`keep`), before that policy exists: once the
next batch is trained, the state of a version is gone.

INVARIANT: at most one checkpoint is being written. It holds the state after a whole number of batches, and the broker
knows the policy version before the checkpoint's version, so that a resumed learner can publish the next one. `keep`
gets the first checkpoint that begins with its version or a later one, also if that is the one at the end of the run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from nouscoder.atomic_files import StorageError
from nouscoder.config import LearnerSection
from nouscoder.learner.core import HalfTrained, LearnerCore, LearnerError
from nouscoder.learner.metrics.prometheus import CheckpointOutcome, LearnerMetrics
from nouscoder.learner.publication.publication import Publication
from nouscoder.learner.state.checkpoint_store import Checkpoint, PendingCheckpoint, keep_checkpoint

log = logging.getLogger(__name__)

# Checkpoints are retried after each batch. Saved batches protect the run meanwhile, but they fill the disk.
_MAX_FAILURES_IN_A_ROW = 5


@dataclass(frozen=True, slots=True)
class _Stored:
    """A complete checkpoint. `kept` is the folder of the kept one or why there is none; None when nobody asked."""

    path: Path
    kept: Path | StorageError | None = None


@dataclass(frozen=True, slots=True)
class KeptCheckpoint:
    """A checkpoint that is kept for an evaluation: its state is copied, and it is being written."""

    policy_version: int
    written: asyncio.Task[_Stored | Exception]

    async def path(self) -> Path:
        """Its folder, when it is complete. Raises NousCoderError."""
        outcome = await asyncio.shield(self.written)
        kept = outcome if isinstance(outcome, Exception) else outcome.kept
        if isinstance(kept, Exception):
            raise kept
        assert kept is not None
        return kept


@dataclass(frozen=True, slots=True)
class _Wish:
    """Somebody wants a checkpoint of this policy version, or of the first later one that is possible, to be kept."""

    from_version: int
    begun: asyncio.Future[KeptCheckpoint]


class Checkpoints:
    """Writes checkpoints. The state is copied in `training`, the training thread, and written in other threads."""

    def __init__(
        self,
        settings: LearnerSection,
        core: LearnerCore,
        metrics: LearnerMetrics,
        training: Executor,
        publication: Publication,
        kept: Path,
    ) -> None:
        """`kept` is the folder of checkpoints that evaluations ask for."""
        self._settings = settings
        self._core = core
        self._metrics = metrics
        self._training = training
        self._publication = publication
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._task: asyncio.Task[_Stored | Exception] | None = None
        self._batches_since = 0
        self._since = time.monotonic()
        self._failures = 0
        self._kept = kept
        self._wishes: list[_Wish] = []
        self._is_over = False

    async def after_batch(self) -> None:
        """Begin a checkpoint when it is due or wished for and none is being written. Returns once the state is copied.

        A failed checkpoint is logged, counted, and retried after the next batch. Raises the error of the last one when
        too many failed in a row.
        """
        self._batches_since += 1
        is_due = (
            self._batches_since >= self._settings.checkpoint_every_batches
            or time.monotonic() - self._since >= self._settings.checkpoint_every_s
        )
        if self._task is not None and self._task.done():
            outcome = self._task.result()
            if isinstance(outcome, Exception) and self._failures >= _MAX_FAILURES_IN_A_ROW:
                raise outcome
        if (is_due or self._granted()) and (self._task is None or self._task.done()):
            await self._begin()

    async def keep(self, from_version: int) -> KeptCheckpoint:
        """Wait for a batch that makes policy version `from_version` or a later one, and keep a checkpoint after it.

        Returns once the state is copied. Raises NousCoderError when it could not be, or the run ends before.
        """
        if self._is_over:
            raise _too_late(from_version)
        wish = _Wish(from_version, asyncio.get_running_loop().create_future())
        self._wishes.append(wish)
        try:
            return await wish.begun
        finally:
            self._wishes.remove(wish)

    def no_more_batches(self) -> None:
        """No batch follows: nobody need wait for a checkpoint after one."""
        self._is_over = True
        for wish in self._wishes:
            if not wish.begun.done():
                wish.begun.set_exception(_too_late(wish.from_version))

    def more_batches(self) -> None:
        """Batches follow after all: the run goes on after its end."""
        self._is_over = False

    async def now(self) -> Path:
        """Write the state after the batch in training to disk. Returns the path. Raises NousCoderError."""
        while True:
            if self._task is not None:
                await asyncio.wait({self._task})
            await self._publication.settle()
            if self._task is None or self._task.done():
                outcome = await asyncio.shield(await self._begin())
                if not isinstance(outcome, _TooEarly):
                    break
        if isinstance(outcome, Exception):
            raise outcome
        return outcome.path

    async def close(self) -> None:
        """Wait for the checkpoint that is being written."""
        self.no_more_batches()
        if self._task is not None:
            await asyncio.wait({self._task})
        await asyncio.to_thread(self._writing.shutdown, wait=True)

    def _granted(self) -> list[_Wish]:
        """The wishes that a checkpoint of the present state fulfils."""
        version = self._core.progress.policy_version
        return [wish for wish in self._wishes if wish.from_version <= version and not wish.begun.done()]

    async def _begin(self) -> asyncio.Task[_Stored | Exception]:
        """Begin a checkpoint after the current work of the training thread. Returns once the state is copied."""
        wishes, known_version = self._granted(), self._publication.known_version
        copied = asyncio.get_running_loop().run_in_executor(self._training, self._copy, known_version)
        written = asyncio.create_task(self._write(copied, bool(wishes)))
        self._task = written
        await asyncio.wait({copied})
        self._tell(wishes, copied, written)
        return written

    def _tell(
        self,
        wishes: list[_Wish],
        copied: asyncio.Future[PendingCheckpoint | Checkpoint],
        written: asyncio.Task[_Stored | Exception],
    ) -> None:
        """Tell those who wait for a kept checkpoint that its state is copied, or why not."""
        error = copied.exception()
        if isinstance(error, _TooEarly | HalfTrained):
            return  # they wait for the next checkpoint
        for wish in wishes:
            if wish.begun.done():  # its caller went away
                continue
            if error:
                wish.begun.set_exception(error)
            else:
                wish.begun.set_result(KeptCheckpoint(copied.result().progress.policy_version, written))

    def _store(self, pending: PendingCheckpoint | Checkpoint, keep: bool) -> _Stored:
        """Complete the checkpoint, and keep it. Nothing prunes in between, because one thread writes and prunes."""
        stored = pending if isinstance(pending, Checkpoint) else self._core.finish_checkpoint(pending)
        if not keep:
            return _Stored(stored.path)
        try:
            return _Stored(stored.path, keep_checkpoint(self._kept, stored))
        except StorageError as error:
            log.warning("a checkpoint was not kept", extra={"fault": str(error)})
            return _Stored(stored.path, error)

    def _copy(self, known_version: int) -> PendingCheckpoint | Checkpoint:
        progress, newest = self._core.progress, self._core.newest_checkpoint
        if newest is not None and newest.progress == progress:
            return newest
        if progress.policy_version > known_version + 1:
            raise _TooEarly(f"policy version {progress.policy_version - 1} is not published yet")
        return self._core.begin_checkpoint()

    async def _write(self, copied: asyncio.Future[PendingCheckpoint | Checkpoint], keep: bool) -> _Stored | Exception:
        """The checkpoint, or the error."""
        started, num_batches = time.monotonic(), self._batches_since
        try:
            pending = await copied
            stored = await asyncio.get_running_loop().run_in_executor(self._writing, self._store, pending, keep)
        except (_TooEarly, HalfTrained) as error:
            return error
        except Exception as error:
            self._failures += 1
            self._metrics.checkpointed(CheckpointOutcome.FAILED, time.monotonic() - started)
            log.warning("a checkpoint failed", extra={"fault": str(error), "failures_in_a_row": self._failures})
            return error
        if isinstance(pending, Checkpoint):  # it was there already
            return stored
        self._failures = 0
        self._since = started
        self._batches_since -= num_batches
        self._metrics.checkpointed(CheckpointOutcome.WRITTEN, time.monotonic() - started)
        return stored


def _too_late(version: int) -> LearnerError:
    return LearnerError(f"the learner ended before a checkpoint of version {version} was possible")


class _TooEarly(LearnerError):
    """A publication must be finished first."""
