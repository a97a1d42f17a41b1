"""The services of a run as the loop sees them, and the one place that chooses how they are operated.

`run.services` names a Deployment: `local` starts the services as processes of this machine (LocalServices), `external`
connects to services that are operated outside the run, at the addresses of the configuration (ExternalServices). No
other module depends on the choice. Redis' client is imported only where a run has a Redis of its own, because the image
for external services does not hold it.

INVARIANT: every address of a local run is a unix socket in a folder that only the user of the run can enter. So no
other user of the machine can call a service of the run or read its metrics, and nobody else can listen where a service
of the run does.

INVARIANT: external services are never started, stopped or signalled. The run waits at most `run.peer_patience_s` for a
service that does not answer. The start and the end of each absence are reported once.

The generation process of a plan serves one stage after the other, so that its engine is not started for each
(KeptGeneration). In the plan's folder are

    generation.toml        the configuration of the stage that it serves
    logs/generation.log    its log

INVARIANT: at most one process is there, and it serves the stage of generation.toml. A stage that its engine cannot
sample for gets a new process, and the reason is said.
"""

from __future__ import annotations

import asyncio
import sys
import time
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from nouscoder.atomic_files import write_whole
from nouscoder.broker.redis_address import configured_url
from nouscoder.config import Config, dump_config
from nouscoder.config.tree import Given
from nouscoder.errors import ExitCode, NousCoderError, Unusable
from nouscoder.evaluation.pass_at_1 import EVALUATION_ERRORS
from nouscoder.policy_folder.prompt_file import with_recorded_prompt
from nouscoder.private_folder import socket_folder
from nouscoder.retry import Retry
from nouscoder.rpc.addresses import unix_address
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.channel import PeerError, PeerUnreachable
from nouscoder.rpc.generation_client import GenerationClient
from nouscoder.rpc.tls import channel_credentials
from nouscoder.rpc.worker_id import observer_id
from nouscoder.run.folder import RunFolder, attach_patiently, newest_version
from nouscoder.run.resume import continue_finished, external_changes, note_given, resumed, take
from nouscoder.run.supervisor import SHARED_CORES, ProcessSpec, SupervisedProcess, Supervisor

Say = Callable[[str], None]


class RunServices:
    """The services as the loop needs them, for every deployment. `config` holds their addresses.

    `evaluation_retry` says how long an evaluation is retried after EVALUATION_ERRORS.
    """

    config: Config
    watch_every_s: float
    evaluation_retry: Retry

    @property
    def processes(self) -> Sequence[SupervisedProcess]:
        """The processes of this run that this command started, for display."""
        return ()

    @property
    def learner_ended(self) -> bool:
        """Whether the learner has stopped writing to the run folder."""
        return True

    def start(self, *names: str) -> None:
        """From now on these services must run."""

    def heard(self, answered: Mapping[str, bool]) -> None:
        """Record which services answered just now."""

    def check(self) -> None:
        """Raises NousCoderError when a started service cannot be kept alive."""


# The generation process of a plan.


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


# Services that are processes of this machine: their addresses, commands and order.

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
async def _open_local(
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


# Services that are operated outside of the run.

EVALUATION_BEFORE = "evaluation_before.json"
_REPORT_AFTER_S = 5.0
_CHOOSE_EVERY_S = 5.0


class ServiceAway(NousCoderError):
    """An external service has not answered for too long. The message names it."""

    exit_code = ExitCode.UNAVAILABLE


class ExternalServices(RunServices):
    """Watches the services. `say` reports when one stops answering and when it answers again.

    They run already, and the learner waits for the file of the first evaluation. It keeps running after the run, whose
    end the broker reports.
    """

    watch_every_s = 2.0

    def __init__(self, config: Config, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises Unusable when the learner would not wait for the evaluation of the first policy."""
        if config.learner.start_after != EVALUATION_BEFORE:
            raise Unusable(
                f'learner.start_after must be "{EVALUATION_BEFORE}" when run.services is "external":'
                " the learner must not train before the first policy is evaluated"
            )
        self.config = config
        self._patience_s = config.run.peer_patience_s
        self.evaluation_retry = Retry("evaluation", EVALUATION_ERRORS, for_s=self._patience_s, wait_s=2.0)
        self._say = say
        self._clock = clock
        self._away_since: dict[str, float] = {}
        self._reported: set[str] = set()

    def heard(self, answered: Mapping[str, bool]) -> None:
        """Record since when each service has not answered. Interruptions of a few seconds are not reported."""
        now = self._clock()
        for name, is_there in answered.items():
            since = self._away_since.setdefault(name, now)
            if not is_there:
                if now - since >= _REPORT_AFTER_S and name not in self._reported:
                    self._reported.add(name)
                    self._say(f"the {name} does not answer: waiting up to {self._patience_s:.0f} s for it")
                continue
            del self._away_since[name]
            if name in self._reported:
                self._reported.discard(name)
                self._say(f"the {name} answers again after {now - since:.0f} s")

    def check(self) -> None:
        """Raises ServiceAway."""
        for name, since in self._away_since.items():
            if self._clock() - since > self._patience_s:
                raise ServiceAway(
                    f"the {name} has not answered for {self._patience_s:.0f} s; nothing of the run is lost: run the"
                    " same command again when it is back"
                )


# The choice.


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """A run folder, the configuration of the run, and what is to be said of it."""

    folder: RunFolder
    config: Config
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Deployment:
    """How `nouscoder train` works with services that are operated in one way.

    open_folder    opens the run folder; takes the configuration, whether --resume was given, and what a person gave
    open_services  the services of the run; on exit, none that this command started is left running, except a generation
                   process that is kept for the next stage of a plan
    line_every_s   seconds between two progress lines where there is no terminal
    json_logs      whether the command's own logs are JSON lines on stderr
    """

    open_folder: Callable[[Config, bool, Given], Awaitable[OpenedRun]]
    open_services: Callable[[RunFolder, Config, Say, KeptGeneration | None], AbstractAsyncContextManager[RunServices]]
    line_every_s: float
    json_logs: bool


def deployment(config: Config) -> Deployment:
    """The deployment that `run.services` names."""
    if config.run.services == "external":
        return Deployment(_attach, _open_external, line_every_s=10.0, json_logs=True)
    return Deployment(_create_or_reopen, _open_local, line_every_s=2.0, json_logs=False)


async def _create_or_reopen(config: Config, resume: bool, given: Given) -> OpenedRun:
    """A new run folder; with `resume` that of an earlier run, with its configuration and the new values of `given`.

    Raises ConfigError with every fault that can be found before a process starts, and RunChanged for new values that
    the run cannot take.
    """
    from nouscoder.run.preflight import checked, notes_of

    if not resume:
        RunFolder.refuse_existing(config.run.folder)
        config = await checked(config)
        folder = RunFolder.create(config)
        note_given(folder, given)
        return OpenedRun(folder, config, await asyncio.to_thread(notes_of, config))
    folder, recorded = RunFolder.reopen(config.run.folder)
    try:
        run = resumed(folder.path, recorded, given)
        config = await checked(run.config)
        continue_finished(folder, run)
        take(folder, run, given, newest_version(config))
        return OpenedRun(folder, config, [*run.lines, *await asyncio.to_thread(notes_of, config)])
    except BaseException:
        folder.close()
        raise


async def _attach(config: Config, resume: bool, given: Given) -> OpenedRun:
    """The run folder, made when it is missing: an external run always continues, with the configuration given now."""
    file = config.run.folder / "config.toml"
    before = tomllib.loads(file.read_text(encoding="utf8")) if file.exists() else None
    found = with_recorded_prompt(config, config.in_run_folder(config.policy.path))
    # The policy may have been made after the first start: what the run then recorded stays.
    environment = before and before.get("generation", {}).get("environment")
    config = config if environment == tomllib.loads(dump_config(config))["generation"]["environment"] else found
    folder = await attach_patiently(config)
    try:
        run = external_changes(folder, config)
        continue_finished(folder, run, is_external=True)
        folder.record_given(config)
    except BaseException:
        folder.close()
        raise
    return OpenedRun(folder, config, run.lines)


@asynccontextmanager
async def _open_external(
    folder: RunFolder, config: Config, say: Say, generation: KeptGeneration | None
) -> AsyncIterator[RunServices]:
    async with _stage_chosen(config):
        yield ExternalServices(config, say)


@asynccontextmanager
async def _stage_chosen(config: Config) -> AsyncIterator[None]:
    """Have the broker serve the run of this stage of a plan while the block runs, also after Redis lost its choice."""
    if "/" not in config.run.name:
        yield
        return

    async def choose() -> None:
        client = BrokerClient(config.broker.grpc, observer_id("stage"), 0.0, channel_credentials(config.tls))
        async with client as broker:
            while True:
                with suppress(PeerUnreachable):
                    await broker.serve_stage(config.run.name)
                await asyncio.sleep(_CHOOSE_EVERY_S)

    task = asyncio.ensure_future(choose())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
