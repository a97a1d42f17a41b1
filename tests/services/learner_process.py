"""A learner in a separate process, which kills itself with SIGKILL at a given point. Its broker's state is in a file.

As a script it reads lines `["folder", "moment"]`, forks a learner for each, and prints its exit code, which is negative
for a signal. The parent process has imported torch but computed nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from nouscoder.config import Config, LearnerSection, RunSection
from nouscoder.domain.batch import Batch
from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.run_status import Ledger
from nouscoder.learner.core import LearnerCore
from nouscoder.learner.metrics.prometheus import LearnerMetrics
from nouscoder.learner.model.synthetic import random_batch, random_policy, write_policy_folder
from nouscoder.learner.state import checkpoint_store
from nouscoder.learner.state.run_log import RunLog
from nouscoder.learner.trainer import Trainer
from nouscoder.learner.worker import LearnerWorker

sys.path.insert(0, str(Path(__file__).parents[2]))  # a script finds only modules beside it

from tests.fake_learner_broker import FakeBroker

NUM_BATCHES, STEPS_PER_BATCH, EVERY_BATCHES = 5, 2, 2


def config_of(root: Path) -> Config:
    """Five batches of two steps; a checkpoint is due every two batches."""
    learner = LearnerSection(
        steps_per_batch=STEPS_PER_BATCH, learning_rate=1e-2, peak_flops=1e9, checkpoint_every_batches=EVERY_BATCHES
    )
    return Config(run=RunSection(root=root, seed=5, total_batches=NUM_BATCHES), learner=learner)


class FileBroker(FakeBroker):
    """A broker whose state is written to a file atomically before each call returns."""

    def __init__(self, file: Path) -> None:
        super().__init__(lambda batch_id, version: random_batch(batch_id, seed=1, policy_version=version))
        self._file = file
        if file.exists():
            self.commits, self.policies, self.finished = pickle.loads(file.read_bytes())

    def _save(self) -> None:
        part = self._file.with_suffix(".part")
        part.write_bytes(pickle.dumps((self.commits, self.policies, self.finished)))
        part.replace(self._file)

    async def publish_policy(self, manifest: PolicyManifest) -> int:
        """Durable when it returns."""
        version = await super().publish_policy(manifest)
        self._save()
        return version

    async def commit_batch(self, batch_id: int, step: int, groups: Iterable[int] = ()) -> bool:
        """Durable when it returns."""
        already = await super().commit_batch(batch_id, step, groups)
        self._save()
        return already

    async def finish_run(self, reason: str) -> Ledger:
        """Durable when it returns."""
        ledger = await super().finish_run(reason)
        self._save()
        return ledger


def train(root: Path, moment: str) -> None:
    """Train the run in `root` to its end, or kill the process at `moment` unless it is ""."""
    config = config_of(root)
    policy = config.run.folder / "policy"
    if not policy.exists():
        write_policy_folder(policy, random_policy(0))
    core, broker = LearnerCore(config), FileBroker(root / "broker.pickle")
    if moment:
        MOMENTS[moment](core, broker)

    async def run() -> None:
        worker = LearnerWorker(config, broker, LearnerMetrics(CollectorRegistry()), core)
        try:
            await worker.run()
        finally:
            await worker.close()

    asyncio.run(run())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # the signal ends the process before it does anything else


def patch(owner: Any, name: str, *, call: int, before: bool) -> None:
    """Kill the process before or after the `call`th call of `owner.name`, counted from 1."""
    real, calls = getattr(owner, name), 0

    def counted(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        mine = calls
        if mine == call and before:
            die()
        answer = real(*arguments, **more)
        if mine == call:
            die()
        return answer

    async def counted_async(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        mine = calls
        if mine == call and before:
            die()
        answer = await real(*arguments, **more)
        if mine == call:
            die()
        return answer

    setattr(owner, name, counted_async if asyncio.iscoroutinefunction(real) else counted)


def _between_steps(core: LearnerCore, broker: FileBroker) -> None:
    patch(Trainer, "_take_step", call=4, before=True)


def _lines_torn(core: LearnerCore, broker: FileBroker) -> None:
    """Kill after half of the line of batch 1's first step is written."""
    real = RunLog.append

    def torn(log: RunLog, lines: Any) -> None:
        if lines.metrics[0]["batch_id"] == 1:
            with (core._files.run / "metrics.jsonl").open("a") as output:
                output.write('{"step": 3, "lo')
            die()
        real(log, lines)

    RunLog.append = torn  # type: ignore[method-assign, assignment]


def _committed_and_not_published(core: LearnerCore, broker: FileBroker) -> None:
    """Kill when batch 1 is committed and its version 2 is not yet published."""
    publish, commit = broker.publish_policy, broker.commit_batch
    committed = asyncio.Event()

    async def publish_late(manifest: PolicyManifest) -> int:
        if manifest.policy_version == 2:
            await committed.wait()
            die()
        return await publish(manifest)

    async def commit_and_tell(batch_id: int, step: int, groups: Iterable[int] = ()) -> bool:
        answer = await commit(batch_id, step, groups)
        if batch_id == 1:
            committed.set()
        return answer

    broker.publish_policy, broker.commit_batch = publish_late, commit_and_tell  # type: ignore[method-assign]


def _published_and_not_committed(core: LearnerCore, broker: FileBroker) -> None:
    """Kill when version 2 is published and its batch 1 is not yet committed."""
    publish, commit = broker.publish_policy, broker.commit_batch
    published = asyncio.Event()

    async def publish_and_tell(manifest: PolicyManifest) -> int:
        answer = await publish(manifest)
        if manifest.policy_version == 2:
            published.set()
        return answer

    async def commit_late(batch_id: int, step: int, groups: Iterable[int] = ()) -> bool:
        if batch_id == 1:
            await published.wait()
            die()
        return await commit(batch_id, step, groups)

    broker.publish_policy, broker.commit_batch = publish_and_tell, commit_late  # type: ignore[method-assign]


def _in_the_middle_of_writing(core: LearnerCore, broker: FileBroker) -> None:
    """Kill when DCP has begun a file of the first checkpoint and batch 2 has been trained."""
    trained, train_batch = threading.Event(), core.train

    def torn(writer: FileSystemWriter, *arguments: Any) -> Any:
        Path(writer.path, "__0_0.distcp").write_bytes(b"the first bytes")
        trained.wait(60)
        die()

    def train_and_tell(batch: Batch, *arguments: Any) -> Any:
        answer = train_batch(batch, *arguments)
        if batch.batch_id == 2:
            trained.set()
        return answer

    FileSystemWriter.write_data = torn  # type: ignore[method-assign, assignment]
    core.train = train_and_tell  # type: ignore[method-assign, assignment]


def _before_its_name(core: LearnerCore, broker: FileBroker) -> None:
    """Kill when DCP has written the checkpoint, before it gets its manifest and its name."""

    def dies(file: Path) -> str:
        die()
        return ""

    checkpoint_store.sha256_of = dies  # type: ignore[attr-defined]


def _at(name: str, *, call: int, before: bool, of_broker: bool = False) -> Callable[[LearnerCore, FileBroker], None]:
    return lambda core, broker: patch(broker if of_broker else core, name, call=call, before=before)


# Batch 1 is the second batch; version 2 is the third published one.
MOMENTS: dict[str, Callable[[LearnerCore, FileBroker], None]] = {
    "before the batch is saved": _at("save_batch", call=2, before=True),
    "after the batch is saved": _at("save_batch", call=2, before=False),
    "between two steps": _between_steps,
    "in the middle of the log lines": _lines_torn,
    "after the log lines": _at("train", call=2, before=False),
    "before the policy is written": _at("write_policy", call=3, before=True),
    "before the policy is published": _at("write_policy", call=3, before=False),
    "published and not committed": _published_and_not_committed,
    "committed and not published": _committed_and_not_published,
    "after the commit": _at("commit_batch", call=2, before=False, of_broker=True),
    "before the checkpoint": _at("begin_checkpoint", call=1, before=True),
    "in the middle of the checkpoint": _in_the_middle_of_writing,
    "before the checkpoint has its name": _before_its_name,
    "after the checkpoint": _at("finish_checkpoint", call=1, before=False),
    "batches after the checkpoint": _at("commit_batch", call=4, before=False, of_broker=True),
    "before the end of the run": _at("finish_run", call=1, before=True, of_broker=True),
    "after the end of the run": _at("finish_run", call=1, before=False, of_broker=True),
}


def serve(train: Callable[[Path, str], None]) -> None:
    """Fork a process that trains for each line on stdin."""
    for line in sys.stdin:
        folder, moment = json.loads(line)
        pid = os.fork()
        if not pid:
            try:
                train(Path(folder), moment)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve(train)
