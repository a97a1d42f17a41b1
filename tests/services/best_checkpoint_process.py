"""A learner and the evaluations of its run in a separate process, which kills itself with SIGKILL at a given point.

The learner, its gRPC service, the client and the files are real. The broker's state is in a file, and the score of a
version is given, not measured. As a script it reads lines as learner_process.py does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from learner_process import FileBroker, patch, serve  # type: ignore[import-not-found]
from prometheus_client import CollectorRegistry
from rich.console import Console

from nouscoder.config import Config, EvaluationSection, LearnerSection, RunSection
from nouscoder.domain.lease import LeasedBatch
from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.run_status import RunStatus
from nouscoder.evaluation.pass_at_1 import EVALUATION_ERRORS
from nouscoder.learner.core import LearnerCore
from nouscoder.learner.metrics.prometheus import LearnerMetrics
from nouscoder.learner.model.synthetic import random_policy, write_policy_folder
from nouscoder.learner.publication.policy_files import PolicyFiles
from nouscoder.learner.publication.sender import PolicySender
from nouscoder.learner.servicer import STATUS_CODES, LearnerServicer
from nouscoder.learner.state import checkpoint_schedule, checkpoint_store
from nouscoder.learner.state.run_files import RunFiles
from nouscoder.learner.worker import LearnerWorker
from nouscoder.retry import Retry
from nouscoder.rpc.status_codes import StatusCodes
from nouscoder.run import evaluation_files, periodic_evaluation
from nouscoder.run.folder import RunFolder
from nouscoder.run.periodic_evaluation import PeriodicEvaluation
from nouscoder.run.view import PlainView
from nouscoder.v1 import learner_pb2_grpc

# pass@1 of each version: it rises to version 3 and falls then.
SCORES = (0.1, 0.3, 0.5, 0.7, 0.6, 0.4, 0.2)
NUM_BATCHES = len(SCORES) - 1


def config_of(root: Path) -> Config:
    """Each version but the last is due to be measured. Only the newest checkpoint stays, and one is due at the end."""
    learner = LearnerSection(
        steps_per_batch=2, learning_rate=1e-2, peak_flops=1e9, checkpoint_every_batches=100, keep_checkpoints=1
    )
    run = RunSection(root=root, seed=5, total_batches=NUM_BATCHES)
    return Config(run=run, learner=learner, evaluation=EvaluationSection(every_batches=1, keep_put_off=0))


class Scored:
    """The services of the run, as evaluations see them."""

    watch_every_s = 0.01
    evaluation_retry = Retry("evaluation", EVALUATION_ERRORS, max_tries=1)

    def __init__(self, config: Config) -> None:
        self.config = config

    def check(self) -> None:
        """All services are alive."""


class Paced(FileBroker):  # type: ignore[misc]
    """A broker that leases a batch only when an evaluation waits for it, or none follows."""

    may_train: Callable[[], bool]

    async def lease_batch(self, wait_s: float = 10.0, run_id: str = "", batches: int = 0) -> LeasedBatch:
        """A batch, in time."""
        async with asyncio.timeout(60):
            while not self.may_train():
                await asyncio.sleep(0.005)
        leased: LeasedBatch = await super().lease_batch(wait_s, run_id, batches)
        return leased

    async def status(self) -> RunStatus:
        """The current state of the run."""
        status: RunStatus = await super().status()
        return status


@asynccontextmanager
async def listening(config: Config, worker: LearnerWorker) -> AsyncIterator[str]:
    """The learner's service. Gives its address."""
    server = grpc.aio.server(interceptors=[StatusCodes(STATUS_CODES, ["nouscoder.v1.LearnerService"])])
    servicer = LearnerServicer(worker, config.total_steps, PolicyFiles(RunFiles.of(config)), PolicySender(config))
    learner_pb2_grpc.add_LearnerServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=1.0)


def train(root: Path, moment: str) -> None:
    """Train and evaluate the run in `root` to its end, or kill the process at `moment` unless it is ""."""
    config = config_of(root)
    if not (config.run.folder / "policy").exists():
        write_policy_folder(config.run.folder / "policy", random_policy(0))
    folder = RunFolder(config.run.folder)
    folder.write_json("evaluation_before.json", {"policy_version": 0, "pass_at_1": SCORES[0]})
    if moment:
        MOMENTS[moment]()
    asyncio.run(_train(config, folder, Paced(root / "broker.pickle")))


async def _train(config: Config, folder: RunFolder, broker: Any) -> None:
    worker = LearnerWorker(config, broker, LearnerMetrics(CollectorRegistry()), LearnerCore(config))

    async def announced(config: Config, from_version: int, limit_s: float) -> PolicyManifest:
        async with asyncio.timeout(60):
            while broker.policies[-1].policy_version < from_version:
                await asyncio.sleep(0.005)
        newest: PolicyManifest = broker.policies[-1]
        return newest

    setattr(periodic_evaluation, "announced_policy", announced)  # noqa: B010 - mypy sees no such names there
    setattr(periodic_evaluation, "measure", measure)  # noqa: B010
    async with listening(config, worker) as address:
        config = config.model_copy(update={"learner": config.learner.model_copy(update={"grpc": address})})
        services: Any = Scored(config)
        async with PeriodicEvaluation(folder, services, PlainView(Console())) as periodic:

            def may_train() -> bool:
                newest = broker.policies[-1].policy_version
                nothing_follows = periodic._running is None and periodic._due(newest) is None
                waits = [wish for wish in worker.checkpoints._wishes if not wish.begun.done()]
                return bool(waits) or nothing_follows

            broker.may_train = may_train
            running = asyncio.ensure_future(worker.run())
            while not running.done():
                await periodic.step(await broker.status())
                await asyncio.sleep(0.005)
            await running
        await worker.close()
    getattr(periodic_evaluation, "drop_worse")(folder.path)  # noqa: B009 - as the run does after its last evaluation
    folder.close()


async def measure(config: Config, manifest: PolicyManifest, **_: bool) -> dict[str, Any]:
    """The given score of a version."""
    return {"policy_version": manifest.policy_version, "pass_at_1": SCORES[manifest.policy_version]}


def _at(owner: Any, name: str, call: int, *, before: bool) -> Callable[[], None]:
    return lambda: patch(owner, name, call=call, before=before)


# Version 2 is the second that is measured. A checkpoint has four files, so the sixth link is in the middle of its own.
MOMENTS: dict[str, Callable[[], None]] = {
    "before the checkpoint is kept": _at(checkpoint_schedule, "keep_checkpoint", 2, before=True),
    "in the middle of the checkpoint that is kept": _at(checkpoint_store, "link_or_copy", 6, before=False),
    "after the checkpoint is kept": _at(checkpoint_schedule, "keep_checkpoint", 2, before=False),
    "before the weights are kept": _at(periodic_evaluation, "keep_weights", 2, before=True),
    "after the weights are kept": _at(periodic_evaluation, "keep_weights", 2, before=False),
    "after the policy is measured": _at(RunFolder, "write_json", 2, before=True),
    "after the evaluation is recorded": _at(RunFolder, "write_json", 2, before=False),
    "in the middle of removing the old best": _at(evaluation_files, "remove", 1, before=False),
    "after the old best is removed": _at(periodic_evaluation, "drop_worse", 2, before=False),
}


if __name__ == "__main__":
    serve(train)
