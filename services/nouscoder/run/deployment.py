"""The one place that chooses how the services of a run are operated.

`run.services` names a Deployment: `local` starts the services as processes of this machine (LocalServices), `external`
connects to services that are operated outside the run, at the addresses of the configuration (ExternalServices). No
other module depends on the choice. Redis' client is imported only where a run has a Redis of its own, because the image
for external services does not hold it.
"""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass

from nouscoder.config import Config, dump_config
from nouscoder.config.tree import Given
from nouscoder.policy_folder.prompt_file import with_recorded_prompt
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.channel import PeerUnreachable
from nouscoder.rpc.tls import channel_credentials
from nouscoder.rpc.worker_id import observer_id
from nouscoder.run.external_services import CHOOSE_EVERY_S, ExternalServices
from nouscoder.run.folder import RunFolder, attach_patiently, newest_version
from nouscoder.run.local_services import KeptGeneration, open_local
from nouscoder.run.resume import continue_finished, external_changes, note_given, resumed, take
from nouscoder.run.services import RunServices, Say


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
    return Deployment(_create_or_reopen, open_local, line_every_s=2.0, json_logs=False)


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
                await asyncio.sleep(CHOOSE_EVERY_S)

    task = asyncio.ensure_future(choose())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
