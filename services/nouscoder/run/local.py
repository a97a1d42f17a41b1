"""The processes of a run on one machine: their addresses, commands and order.

INVARIANT: every address is a unix socket in a folder that only the user of the run can enter. So no other user of the
machine can call a service of the run or read its metrics, and nobody else can listen where a service of the run does.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from nouscoder.broker.redis_address import configured_url
from nouscoder.config import Config
from nouscoder.evaluation.pass_at_1 import EVALUATION_ERRORS
from nouscoder.private_folder import socket_folder
from nouscoder.retry import Retry
from nouscoder.rpc.addresses import unix_address
from nouscoder.run.folder import RunFolder
from nouscoder.run.services import KeptGeneration
from nouscoder.run.supervisor import SHARED_CORES, ProcessSpec, SupervisedProcess, Supervisor

SERVICES = ("broker", "verifier", "generation", "learner")


def with_addresses(config: Config, folder: Path) -> Config:
    """`config` with every address of the four services on a socket of the run in `folder`.

    The sockets stay the same when a process restarts, so that its clients find it again. Raises NotPrivate.
    """
    place, sections = socket_folder(folder), {}
    for name in SERVICES:
        update = {"grpc": unix_address(place / f"{name}.sock"), "metrics": unix_address(place / f"{name}.metrics")}
        sections[name] = getattr(config, name).model_copy(update=update)
    return config.model_copy(update=sections)


def service_spec(folder: RunFolder, name: str) -> ProcessSpec:
    """How to start a service of this run. The learner exits by itself; the verifier leases its work from the broker."""
    command = [sys.executable, "-m", "nouscoder", "serve", name, "--config", str(folder.config_file)]
    if name == "verifier":
        command.append("--broker")
    log_file = folder.logs / f"{name}.log"
    return ProcessSpec(name, tuple(command), log_file, may_end=name == "learner", environment=SHARED_CORES)


def redis_spec(folder: RunFolder) -> ProcessSpec:
    """How to start the run's own Redis. Raises RedisServerError when this machine has none."""
    from nouscoder.broker.redis_server import redis_command

    return ProcessSpec("redis", tuple(redis_command(folder.path / "redis")), folder.logs / "redis.log")


def rewrite_addresses(folder: RunFolder, config: Config, generation: KeptGeneration | None = None) -> Config:
    """Give the run new addresses and record them. A kept generation process keeps its own. Nothing else changes."""
    changed = with_addresses(config, folder.path)
    if generation is not None:
        changed = generation.with_address(changed)
    from nouscoder.broker.redis_server import is_own, redis_url

    if not (url := configured_url(config.broker)) or is_own(url, folder.path / "redis"):
        own = {"redis_url": redis_url(folder.path / "redis")}
        changed = changed.model_copy(update={"broker": changed.broker.model_copy(update=own)})
    return folder.record(changed)


def needs_own_redis(folder: RunFolder, config: Config) -> bool:
    """Whether the run starts its own Redis instead of using the configured one."""
    from nouscoder.broker.redis_server import is_own

    return is_own(config.broker.redis_url, folder.path / "redis")


class LocalServices:
    """Processes of this machine under a supervisor."""

    watch_every_s = 0.5
    # The supervisor starts a process again at once.
    evaluation_retry = Retry("evaluation", EVALUATION_ERRORS, max_tries=3, wait_s=0.5)

    def __init__(
        self, folder: RunFolder, config: Config, supervisor: Supervisor, generation: KeptGeneration | None = None
    ) -> None:
        self.config = config
        self._folder = folder
        self._supervisor = supervisor
        self._generation = generation
        self._started: dict[str, SupervisedProcess] = {}

    def start(self, *names: str) -> None:
        """Start these processes."""
        for name in names:
            if name == "generation" and self._generation is not None:
                self._started[name] = self._generation.start(self.config)
            else:
                self._started[name] = self._supervisor.start(service_spec(self._folder, name))

    def heard(self, answered: Mapping[str, bool]) -> None:
        """Do nothing, because the supervisor watches the processes."""

    def check(self) -> None:
        """Raises SupervisionError."""
        self._supervisor.check()
        if self._generation is not None:
            self._generation.check()

    @property
    def processes(self) -> list[SupervisedProcess]:
        """All processes of the run."""
        return [*self._supervisor.processes, *(self._generation.processes if self._generation is not None else ())]

    @property
    def learner_ended(self) -> bool:
        """Whether the learner's process has exited."""
        return "learner" in self._started and self._started["learner"].ended.is_set()


@asynccontextmanager
async def open_local(
    folder: RunFolder, config: Config, generation: KeptGeneration | None = None
) -> AsyncIterator[LocalServices]:
    """Services as processes of this machine, after Redis has started. All but `generation` are stopped on exit."""
    config = rewrite_addresses(folder, config, generation)
    if generation is not None:
        await generation.prepare(config)
    supervisor = Supervisor(max_restarts_per_hour=config.run.max_restarts_per_hour)
    try:
        if needs_own_redis(folder, config):
            supervisor.start(redis_spec(folder))
        yield LocalServices(folder, config, supervisor, generation)
    finally:
        await supervisor.close()
