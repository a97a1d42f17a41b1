"""Services that are processes of this machine: their addresses, commands and order.

INVARIANT: every address of a local run is a unix socket in a folder that only the user of the run can enter. So no
other user of the machine can call a service of the run or read its metrics, and nobody else can listen where a service
of the run does.

The generation process of a plan serves one stage after the other, so that its engine is not started for each
(KeptGeneration). In the plan's folder are

    generation.toml        the configuration of the stage that it serves
    logs/generation.log    its log

INVARIANT: at most one process is there, and it serves the stage of generation.toml. A stage that its engine cannot
sample for gets a new process, and the reason is said.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from nouscoder.atomic_files import write_whole
from nouscoder.broker.redis_address import configured_url
from nouscoder.config import Config, dump_config
from nouscoder.evaluation.pass_at_1 import EVALUATION_ERRORS
from nouscoder.private_folder import socket_folder
from nouscoder.retry import Retry
from nouscoder.rpc.addresses import unix_address
from nouscoder.rpc.channel import PeerError
from nouscoder.rpc.generation_client import GenerationClient
from nouscoder.rpc.tls import channel_credentials
from nouscoder.run.folder import RunFolder
from nouscoder.run.services import RunServices, Say
from nouscoder.run.supervisor import SHARED_CORES, ProcessSpec, SupervisedProcess, Supervisor


class KeptGeneration:
    """Use `prepare` and then `start` in each stage; `close` ends the process. `folder` is the plan's."""

    def __init__(self, folder: Path, say: Say) -> None:
        self._folder = folder
        self._say = say
        self._supervisor: Supervisor | None = None
        self._config: Config | None = None

    @property
    def processes(self) -> list[SupervisedProcess]:
        """The process, if there is one."""
        return [] if self._supervisor is None else self._supervisor.processes

    def with_address(self, config: Config) -> Config:
        """`config` with the addresses at which the process listens; unchanged when there is none."""
        if self._config is None:
            return config
        kept = {name: getattr(self._config.generation, name) for name in ("grpc", "metrics")}
        return config.changed(generation=kept)

    async def prepare(self, config: Config) -> None:
        """Have the process serve the stage of `config`, or end it when it cannot. Raises SupervisionError."""
        write_whole(self._folder / "generation.toml", dump_config(config).encode(), private=True)
        if self._supervisor is None:
            return
        self._supervisor.check()
        try:
            async with GenerationClient(config.generation.grpc, credentials=channel_credentials(config.tls)) as client:
                await client.serve_next_run()
        except PeerError as error:
            self._say(f"generation is started again for {config.run.name}: {error}")
            await self.close()

    def start(self, config: Config) -> SupervisedProcess:
        """Start the process, unless it serves the stage of `config` already."""
        if self._supervisor is None:
            self._supervisor = Supervisor(max_restarts_per_hour=config.run.max_restarts_per_hour)
            file = self._folder / "generation.toml"
            command = (sys.executable, "-m", "nouscoder", "serve", "generation", "--config", str(file))
            log_file = self._folder / "logs" / "generation.log"
            self._supervisor.start(ProcessSpec("generation", command, log_file, environment=SHARED_CORES))
        self._config = config
        return self._supervisor.processes[0]

    def check(self) -> None:
        """Raises SupervisionError when the process cannot be kept alive."""
        if self._supervisor is not None:
            self._supervisor.check()

    async def close(self) -> None:
        """End the process."""
        if self._supervisor is not None:
            await self._supervisor.close()
        self._supervisor = self._config = None


SERVICES = ("broker", "verifier", "generation", "learner")


def service_spec(folder: RunFolder, name: str) -> ProcessSpec:
    """How to start a service of this run. The learner exits by itself; the verifier leases its work from the broker."""
    command = [sys.executable, "-m", "nouscoder", "serve", name, "--config", str(folder.config_file)]
    if name == "verifier":
        command.append("--broker")
    log_file = folder.logs / f"{name}.log"
    return ProcessSpec(name, tuple(command), log_file, may_end=name == "learner", environment=SHARED_CORES)


def rewrite_addresses(folder: RunFolder, config: Config, generation: KeptGeneration | None = None) -> Config:
    """Give each service an address on a socket of the run, and record them. A kept generation process keeps its own.

    The sockets stay the same when a process restarts, so that its clients find it again. Raises NotPrivate.
    """
    from nouscoder.broker.redis_server import is_own, redis_url

    place = socket_folder(folder.path)
    sections = {
        name: {"grpc": unix_address(place / f"{name}.sock"), "metrics": unix_address(place / f"{name}.metrics")}
        for name in SERVICES
    }
    if not (url := configured_url(config.broker)) or is_own(url, folder.path / "redis"):
        sections["broker"]["redis_url"] = redis_url(folder.path / "redis")
    changed = config.changed(**sections)
    return folder.record(changed if generation is None else generation.with_address(changed))


class LocalServices(RunServices):
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

    def check(self) -> None:
        """Raises SupervisionError."""
        self._supervisor.check()
        if self._generation is not None:
            self._generation.check()

    @property
    def processes(self) -> Sequence[SupervisedProcess]:
        """All processes of the run."""
        return [*self._supervisor.processes, *(self._generation.processes if self._generation is not None else ())]

    @property
    def learner_ended(self) -> bool:
        """Whether the learner's process has exited."""
        return "learner" in self._started and self._started["learner"].ended.is_set()


@asynccontextmanager
async def open_local(
    folder: RunFolder, config: Config, say: Say, generation: KeptGeneration | None
) -> AsyncIterator[LocalServices]:
    """Services as processes of this machine, after Redis has started. All but `generation` are stopped on exit."""
    from nouscoder.broker.redis_server import is_own, redis_command

    config = rewrite_addresses(folder, config, generation)
    if generation is not None:
        await generation.prepare(config)
    supervisor = Supervisor(max_restarts_per_hour=config.run.max_restarts_per_hour)
    try:
        if is_own(config.broker.redis_url, place := folder.path / "redis"):
            supervisor.start(ProcessSpec("redis", tuple(redis_command(place)), folder.logs / "redis.log"))
        yield LocalServices(folder, config, supervisor, generation)
    finally:
        await supervisor.close()
