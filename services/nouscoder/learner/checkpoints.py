"""Decides when to write checkpoints: every n batches or t seconds in the background, and at once on request.

INVARIANT: at most one checkpoint is being written. It holds the state after a whole number of batches, and the broker
knows the policy version before the checkpoint's version, so that a resumed learner can publish the next one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

from nouscoder.config import LearnerSection
from nouscoder.learner.checkpoint import PendingCheckpoint
from nouscoder.learner.core import HalfTrained, LearnerCore, LearnerError
from nouscoder.learner.metrics import CheckpointOutcome, LearnerMetrics
from nouscoder.learner.publication import Publication

log = logging.getLogger(__name__)

# Checkpoints are retried after each batch. Saved batches protect the run meanwhile, but they fill the disk.
_MAX_FAILURES_IN_A_ROW = 5


class Checkpoints:
    """Writes checkpoints. The state is copied in `training`, the training thread, and written in other threads."""

    def __init__(
        self,
        settings: LearnerSection,
        core: LearnerCore,
        metrics: LearnerMetrics,
        training: Executor,
        publication: Publication,
    ) -> None:
        self._settings = settings
        self._core = core
        self._metrics = metrics
        self._training = training
        self._publication = publication
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._task: asyncio.Task[Path | Exception] | None = None
        self._batches_since = 0
        self._since = time.monotonic()
        self._failures = 0

    async def after_batch(self) -> None:
        """Begin a checkpoint when it is due and none is being written. Returns once the state is copied.

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
        if is_due and (self._task is None or self._task.done()):
            copied, self._task = self._begin()
            await asyncio.wait({copied})

    async def now(self) -> Path:
        """Write the state after the batch in training to disk. Returns the path. Raises NousCoderError."""
        while True:
            if self._task is not None:
                await asyncio.wait({self._task})
            await self._publication.settle()
            if self._task is None or self._task.done():
                _, self._task = self._begin()
                outcome = await asyncio.shield(self._task)
                if not isinstance(outcome, _TooEarly):
                    break
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def close(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self._task is not None:
            await asyncio.wait({self._task})
        await asyncio.to_thread(self._writing.shutdown, wait=True)

    def _begin(self) -> tuple[asyncio.Future[PendingCheckpoint | Path], asyncio.Task[Path | Exception]]:
        """Queue the copy after the current work of the training thread, and the writing after the copy."""
        known_version = self._publication.known_version
        copied = asyncio.get_running_loop().run_in_executor(self._training, self._copy, known_version)
        return copied, asyncio.create_task(self._write(copied))

    def _copy(self, known_version: int) -> PendingCheckpoint | Path:
        progress, newest = self._core.progress, self._core.newest_checkpoint
        if newest is not None and newest.progress == progress:
            return newest.path
        if progress.policy_version > known_version + 1:
            raise _TooEarly(f"policy version {progress.policy_version - 1} is not published yet")
        return self._core.begin_checkpoint()

    async def _write(self, copied: asyncio.Future[PendingCheckpoint | Path]) -> Path | Exception:
        """The path of the checkpoint, or the error."""
        started, num_batches = time.monotonic(), self._batches_since
        try:
            pending = await copied
            if isinstance(pending, Path):
                return pending
            loop = asyncio.get_running_loop()
            checkpoint = await loop.run_in_executor(self._writing, self._core.finish_checkpoint, pending)
        except (_TooEarly, HalfTrained) as error:
            return error
        except Exception as error:
            self._failures += 1
            self._metrics.checkpointed(CheckpointOutcome.FAILED, time.monotonic() - started)
            log.warning("a checkpoint failed", extra={"fault": str(error), "failures_in_a_row": self._failures})
            return error
        self._failures = 0
        self._since = started
        self._batches_since -= num_batches
        self._metrics.checkpointed(CheckpointOutcome.WRITTEN, time.monotonic() - started)
        return checkpoint.path


class _TooEarly(LearnerError):
    """A publication must be finished first."""
