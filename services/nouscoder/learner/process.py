"""The learner's process: its gRPC server, and the worker that trains on rank 0; what the other ranks do.

When the last batch is committed, the run is finished and `serve` returns; the process exits with code 0. With
learner.serve_after_run it keeps serving policies until SIGTERM. On SIGTERM `serve` returns without waiting for the
batch in training, which is trained again after a restart.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import AsyncExitStack
from pathlib import Path

from prometheus_client import CollectorRegistry

from nouscoder.config import Config
from nouscoder.errors import Unusable
from nouscoder.learner.core import LearnerCore
from nouscoder.learner.follower import RankFollower
from nouscoder.learner.metrics.prometheus import LearnerMetrics
from nouscoder.learner.parallel.ranks import Ranks
from nouscoder.learner.publication.policy_files import PolicyFiles
from nouscoder.learner.publication.sender import PolicySender
from nouscoder.learner.servicer import FULL_NAME, STATUS_CODES, LearnerServicer
from nouscoder.learner.state.run_files import RunFiles
from nouscoder.learner.worker import LearnerWorker
from nouscoder.recorded_evaluations import RecordedEvaluations
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.health import Health
from nouscoder.rpc.server import Served, run_until_stopped, start_grpc, stop_event
from nouscoder.rpc.tls import channel_credentials, server_credentials
from nouscoder.rpc.worker_id import sole_worker_id

log = logging.getLogger(__name__)


async def serve(config: Config) -> None:
    """Train until the run's batches are done or SIGTERM. Raises NousCoderError with a message of one sentence.

    With learner.serve_after_run it then serves the policies until SIGTERM.
    """
    learner, policy = config.learner, config.in_run_folder(config.policy.path)
    if not policy.exists() and not config.run.folder.exists():
        raise Unusable(f"policy.path: {policy} does not exist; --config names the run's configuration")
    ranks = await asyncio.to_thread(Ranks.join, learner.device, learner.rank_patience_s, learner.context_parallel)
    if ranks.rank:
        # Supervisors signal every rank. Rank 0 decides: it completes its step and tells the others to stop.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        await asyncio.to_thread(RankFollower(config, ranks).run)
        return
    registry = CollectorRegistry()
    async with AsyncExitStack() as stack:
        stop = stop_event()
        client = BrokerClient(
            config.broker.grpc,
            sole_worker_id("learner"),  # the lock on the run folder admits one learner
            patience_s=config.run.peer_patience_s,
            credentials=channel_credentials(config.tls),
            run=config.asked_run,
        )
        broker = await stack.enter_async_context(client)
        sender = PolicySender(config)
        metrics = LearnerMetrics(registry)
        metrics.watch_evaluations(RecordedEvaluations(config.run.folder))
        metrics.watch_storage(Path(config.run.folder))
        worker = LearnerWorker(config, broker, metrics, LearnerCore(config, ranks), sender)
        stack.push_async_callback(worker.stop)
        servicer = LearnerServicer(worker, config.total_steps, PolicyFiles(RunFiles.of(config)), sender)
        served = Served(
            config.learner.grpc,
            config.learner.metrics,
            [FULL_NAME],
            servicer.add_to_server,
            registry,
            drain_s=1.0,
            credentials=server_credentials(config.tls),
            status_codes=STATUS_CODES,
            health=Health(config.learner.grpc_health),
            certificates=(config.tls.certificate,),
            run=config.asked_run,
        )
        await start_grpc(served, stack)
        work = _work_and_stay(worker) if config.learner.serve_after_run else worker.run()
        await run_until_stopped(stop, work)


async def _work_and_stay(worker: LearnerWorker) -> None:
    await worker.run()
    log.info("the run is finished: its policies are served until SIGTERM")
    await worker.stay()
