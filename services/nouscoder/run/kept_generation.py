"""The generation process of a plan: it serves one stage after the other, so that its engine is not started for each.

    generation.toml        the configuration of the stage that it serves, in the plan's folder
    logs/generation.log    its log, in the plan's folder

INVARIANT: at most one process is there, and it serves the stage of generation.toml. A stage that its engine cannot
sample for gets a new process, and the reason is said.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from nouscoder.atomic_files import write_whole
from nouscoder.config import Config, dump_config
from nouscoder.rpc.channel import PeerError
from nouscoder.rpc.generation_client import GenerationClient
from nouscoder.rpc.tls import channel_credentials
from nouscoder.run.shared_cores import SHARED_CORES
from nouscoder.run.supervisor import ProcessSpec, Supervised, Supervisor

_NAME = "generation"


class KeptGeneration:
    """Use `prepare` and then `start` in each stage; `close` ends the process. `folder` is the plan's."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._supervisor: Supervisor | None = None
        self._config: Config | None = None

    @property
    def processes(self) -> list[Supervised]:
        """The process, if there is one."""
        return [] if self._supervisor is None else self._supervisor.processes

    def with_address(self, config: Config) -> Config:
        """`config` with the addresses at which the process listens; unchanged when there is none."""
        if self._config is None:
            return config
        kept = {name: getattr(self._config.generation, name) for name in ("grpc", "metrics")}
        return config.model_copy(update={_NAME: config.generation.model_copy(update=kept)})

    async def prepare(self, config: Config) -> None:
        """Have the process serve the stage of `config`, or end it when it cannot. Raises SupervisionError."""
        write_whole(self._folder / "generation.toml", dump_config(config).encode())
        if self._supervisor is None:
            return
        self._supervisor.check()
        try:
            async with GenerationClient(config.generation.grpc, credentials=channel_credentials(config.tls)) as client:
                await client.serve_next_run()
        except PeerError as error:
            self._say(f"generation is started again for {config.run.name}: {error}")
            await self.close()

    def start(self, config: Config) -> Supervised:
        """Start the process, unless it serves the stage of `config` already."""
        if self._supervisor is None:
            self._supervisor = Supervisor(max_restarts_per_hour=config.run.max_restarts_per_hour)
            file = self._folder / "generation.toml"
            command = (sys.executable, "-m", "nouscoder", "serve", _NAME, "--config", str(file))
            log_file = self._folder / "logs" / "generation.log"
            self._supervisor.start(ProcessSpec(_NAME, command, log_file, environment=SHARED_CORES))
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
