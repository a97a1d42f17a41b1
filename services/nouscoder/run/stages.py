"""A service of a plan whose services are external: it serves the stage that the broker serves, and then the next one.

`nouscoder train` chooses the stage at the broker (`Stages`). Generation and learner ask the broker for the name
of its run when they start, and every few seconds afterwards. When it is another one, they stop as on SIGTERM, and the
process starts itself again with the stage of then. So each stage has a process of its own, as a run without a plan
has, and no memory of a GPU is left. The verifier has no stage.

INVARIANT: no service takes part in two runs at a time. A service that is late, or early, is refused by the others,
which answer only calls for their own run (rpc/status_codes.py), and the callers try again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from nouscoder.config import Config, load_config
from nouscoder.errors import ExitCode
from nouscoder.retry import Retry
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.channel import PeerError
from nouscoder.rpc.tls import channel_credentials
from nouscoder.rpc.worker_id import observer_id
from nouscoder.run.supervisor import SupervisionError

_LOOK_EVERY_S = 2.0
log = logging.getLogger(__name__)


def has_stages(config: Config) -> bool:
    """Whether the services of this configuration serve the stages of a plan."""
    return bool(config.plan.stages and config.asked_run)


def serve_stage(config: Config, serve: Callable[[Config], None], *, is_learner: bool) -> None:
    """Serve the stage of the plan that the broker serves. Does not return when another stage follows.

    Raises PeerError when the broker does not answer for run.peer_patience_s, and what `serve` raises.
    """
    run = asyncio.run(_run_of_broker(config, config.run.peer_patience_s))
    stage = config.stage_run(_index(config, run))
    stage = asyncio.run(_with_begun_policy(stage)) if is_learner else _with_own_cache(config, stage)
    watch = _StageWatch(config, run)
    watch.start()
    log.info("serving a stage of the plan", extra={"run": run})
    serve(stage)
    is_rank = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not (watch.has_ended or (is_rank and asyncio.run(_is_over(config, run)))):
        return
    log.info("another stage begins: the process starts again", extra={"run": run})
    if is_rank:
        sys.exit(ExitCode.IN_USE)  # what started the ranks starts them again
    os.execv(sys.executable, [sys.executable, "-m", "nouscoder", *sys.argv[1:]])


def _index(config: Config, run: str) -> int:
    index = config.stage_named(run)
    if index is None:
        raise SupervisionError(f"the broker serves the run {run}, which is no stage of the plan {config.run.name}")
    return index


async def _run_of_broker(config: Config, patience_s: float) -> str:
    client = BrokerClient(config.broker.grpc, observer_id("stage"), patience_s, channel_credentials(config.tls))
    async with client as broker:
        return (await broker.status()).run


async def _is_over(config: Config, run: str) -> bool:
    try:
        return await _run_of_broker(config, 0.0) != run
    except PeerError:
        return False


def _with_own_cache(config: Config, stage: Config) -> Config:
    """`stage` with a part of generation.cache of its own, because versions begin again. Those of others are removed."""
    if not config.generation.cache:
        return stage
    whole, own = Path(config.generation.cache), stage.run.folder.name
    for index in range(len(config.plan.stages)):
        if (other := config.of_stage(index).run.folder.name) != own:
            shutil.rmtree(whole / other, ignore_errors=True)
    return stage.changed(generation={"cache": str(whole / own)})


class _Pending(Exception):
    """The run folder of the stage is not there yet."""


async def _with_begun_policy(stage: Config) -> Config:
    """`stage` with the policy that `nouscoder train` chose for it, which its config.toml names, once that is there."""
    file = stage.run.folder / "config.toml"

    async def recorded() -> Config:
        if not file.is_file():
            raise _Pending(f"{file} does not exist yet: nouscoder train writes it")
        return load_config(file)

    begun = await Retry("the stage's run folder", (_Pending,), for_s=stage.run.peer_patience_s).call(recorded)
    return stage.changed(policy={"path": begun.policy.path})


class _StageWatch(threading.Thread):
    """Sends this process SIGTERM when the broker serves another run. `has_ended` says that it did."""

    def __init__(self, config: Config, run: str) -> None:
        super().__init__(name="stage", daemon=True)
        self._config = config
        self._run_name = run
        self.has_ended = False

    def run(self) -> None:
        """Look until the stage has ended."""
        while not asyncio.run(_is_over(self._config, self._run_name)):
            threading.Event().wait(_LOOK_EVERY_S)
        self.has_ended = True
        os.kill(os.getpid(), signal.SIGTERM)
