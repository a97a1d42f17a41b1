"""The services of a run as the loop sees them, and the one place that chooses how they are operated.

`run.services` names a Deployment: `local` starts the services as processes of this machine (local.py), `external`
connects to services that are operated outside the run (external.py). No other module depends on the choice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from nouscoder.config import Config
from nouscoder.retry import Retry
from nouscoder.run.folder import RunFolder, attach_patiently
from nouscoder.run.kept_generation import KeptGeneration
from nouscoder.run.supervisor import Supervised

Say = Callable[[str], None]


class RunServices(Protocol):
    """The services as the loop needs them, for every deployment. `config` holds their addresses.

    `evaluation_retry` says how long an evaluation is retried after EVALUATION_ERRORS.
    """

    config: Config
    watch_every_s: float
    evaluation_retry: Retry

    def start(self, *names: str) -> None:
        """From now on these services must run."""
        ...

    def heard(self, answered: Mapping[str, bool]) -> None:
        """Record which services answered just now."""
        ...

    def check(self) -> None:
        """Raises NousCoderError when a started service cannot be kept alive."""
        ...

    @property
    def processes(self) -> list[Supervised]:
        """The processes of this run that this command started, for display."""
        ...

    @property
    def learner_ended(self) -> bool:
        """Whether the learner has stopped writing to the run folder."""
        ...


@dataclass(frozen=True, slots=True)
class Deployment:
    """How `nouscoder train` works with services that are operated in one way.

    open_folder    opens the run folder; takes the configuration and whether --resume was given
    open_services  the services of the run; on exit, none that this command started is left running, except a generation
                   process that is kept for the next stage of a plan
    line_every_s   seconds between two progress lines where there is no terminal
    json_logs      whether the command's own logs are JSON lines on stderr
    """

    open_folder: Callable[[Config, bool], Awaitable[tuple[RunFolder, Config]]]
    open_services: Callable[[RunFolder, Config, Say, KeptGeneration | None], AbstractAsyncContextManager[RunServices]]
    line_every_s: float
    json_logs: bool


def deployment(config: Config) -> Deployment:
    """The deployment that `run.services` names."""
    if config.run.services == "external":
        return Deployment(_attach, _open_external, line_every_s=10.0, json_logs=True)
    return Deployment(_create_or_reopen, _open_local, line_every_s=2.0, json_logs=False)


async def _create_or_reopen(config: Config, resume: bool) -> tuple[RunFolder, Config]:
    """A new run folder; with `resume` that of an earlier run, and the configuration that it recorded.

    Raises ConfigError with every fault that can be found before a process starts.
    """
    from nouscoder.run.preflight import checked

    if resume:
        folder, config = RunFolder.reopen(config.run.folder)
        try:
            return folder, await checked(config)
        except BaseException:
            folder.close()
            raise
    RunFolder.refuse_existing(config.run.folder)
    config = await checked(config)
    return RunFolder.create(config), config


async def _attach(config: Config, resume: bool) -> tuple[RunFolder, Config]:
    """The run folder, made when it is missing: an external run always continues, with the configuration given now."""
    return await attach_patiently(config), config


@asynccontextmanager
async def _open_local(
    folder: RunFolder, config: Config, say: Say, generation: KeptGeneration | None
) -> AsyncIterator[RunServices]:
    # Imported here, because it imports Redis' client, which the image for external services does not hold.
    from nouscoder.run.local import open_local

    async with open_local(folder, config, generation) as services:
        yield services


@asynccontextmanager
async def _open_external(
    folder: RunFolder, config: Config, say: Say, generation: KeptGeneration | None
) -> AsyncIterator[RunServices]:
    from nouscoder.run.external import ExternalServices

    yield ExternalServices(config, say)
