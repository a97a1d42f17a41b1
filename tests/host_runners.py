"""Runners of a pool without a cluster: the real agent, isolated on this host by a subclass (runsc_, userns_runners.py).

The agents listen on the host's loopback. In a pod a NetworkPolicy takes that place.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.free_addresses import free_addresses

from nouscoder.verifier.runner import __file__ as runner_init
from nouscoder.verifier.sandbox.init_build import HARNESS, init_library_path
from nouscoder.verifier.sandbox.runners.pods import GvisorSandbox
from nouscoder.verifier.sandbox.runners.pool import FoundRunner

log = logging.getLogger(__name__)

KEY_TEXT = "the key of a pool of tests, which is no secret"
PoolT = TypeVar("PoolT", bound=GvisorSandbox)


def agent_folders() -> dict[str, Path]:
    """The folders of the agent's home, by their names there."""
    return {"harness": HARNESS, "runner": Path(runner_init).parent, "init": init_library_path().parent}


def agent_environment(home: str, port: int) -> dict[str, str]:
    """The variables of an agent with this home."""
    return {"NOUSCODER_RUNNER_KEY": KEY_TEXT, "NOUSCODER_RUNNER_PORT": str(port), "NOUSCODER_RUNNER_HOME": home}


@dataclass(frozen=True, slots=True)
class Running:
    """A started runner. Its folder has its log."""

    process: asyncio.subprocess.Process
    folder: Path
    port: int

    @property
    def address(self) -> tuple[str, int] | None:
        """None until it listens."""
        return ("127.0.0.1", self.port) if "listening" in (self.folder / "log").read_text() else None


class HostRunners(ABC):
    """See `Source`. A subclass says how an agent is started and ended."""

    def __init__(self) -> None:
        self._running: dict[str, Running] = {}

    @abstractmethod
    def command(self, folder: Path, port: int) -> tuple[Sequence[str], Mapping[str, str] | None]:
        """The command that runs an agent at this port, in a new folder, and its environment (None: this process's)."""

    async def end(self, one: Running) -> None:  # noqa: B027 - most leave nothing
        """End what killing the process leaves."""

    async def start(self, on_change: Callable[[], None]) -> None:  # noqa: B027 - nothing has to start
        """See `Source`."""

    async def list(self) -> Sequence[FoundRunner]:
        """See `Source`."""
        return [FoundRunner(name, one.address) for name, one in self._running.items()]

    async def create(self) -> str | None:
        """See `Source`."""
        folder = Path(tempfile.mkdtemp(prefix="test-runner-"))
        port = int(free_addresses(1)[0].rpartition(":")[2])
        command, environment = self.command(folder, port)
        with (folder / "log").open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, env=environment, cwd="/"
            )
        self._running[folder.name] = Running(process, folder, port)
        return folder.name

    async def remove(self, runner: FoundRunner) -> None:
        """See `Source`."""
        one = self._running.pop(runner.name, None)
        if one is None:
            return
        log.info("the log of runner %s: %s", runner.name, (one.folder / "log").read_text())
        await self.end(one)
        with suppress(ProcessLookupError):
            one.process.kill()
        await one.process.wait()
        shutil.rmtree(one.folder, ignore_errors=True)

    async def quarantine(self, runner: FoundRunner) -> None:
        """See `Source`."""
        await self.remove(runner)

    async def lacked_memory(self, runner: FoundRunner) -> bool:
        """See `Source`."""
        return False

    async def close(self) -> None:
        """See `Source`."""
        for name in list(self._running):
            await self.remove(FoundRunner(name, None))


@asynccontextmanager
async def started(sandbox: PoolT) -> AsyncIterator[PoolT]:
    """The sandbox, started, as long as the context is open. Raises SandboxUnavailable."""
    try:
        await sandbox.start()
        yield sandbox
    finally:
        await sandbox.close()
