"""Keeps the processes of a local run alive.

INVARIANT: a supervised process is running, is being restarted after it died, or has exited as expected. One that dies
more than `max_restarts_per_hour` times within an hour ends the run with its name. After `close` no process of any group
is left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from nouscoder.errors import ExitCode, NousCoderError

log = logging.getLogger(__name__)


_HOUR_S = 3600.0
# Runs a command that the kernel kills when this process is gone.
PARENT_DEATH = Path(__file__).with_name("parent_death.py")


# Makes OpenMP threads wait without spinning, because processes that share cores would waste CPU time.
SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE"}


class SupervisionError(NousCoderError):
    """A process cannot be kept alive. The message names it and ends with its last log line."""


class CannotRunHere(SupervisionError):
    """A process of the run can never work as configured."""

    exit_code = ExitCode.UNUSABLE


class ProcessState(StrEnum):
    """RUNNING -> (died) RESTARTING -> RUNNING; RUNNING -> (exit 0, allowed) ENDED; any -> STOPPED by `close`."""

    RUNNING = "running"
    RESTARTING = "restarting"
    ENDED = "ended"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to keep alive. `environment` extends that of this process. `may_end`: exit code 0 is allowed."""

    name: str
    command: tuple[str, ...]
    log_file: Path
    may_end: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


class SupervisedProcess:
    """One process of a run, over all its restarts."""

    def __init__(
        self, spec: ProcessSpec, max_restarts_per_hour: int, restart_delay_s: float, now_s: Callable[[], float]
    ) -> None:
        self.spec = spec
        self.state = ProcessState.RESTARTING
        self.num_restarts = 0
        self.pid = 0
        self.ended = asyncio.Event()
        self._max_restarts = max_restarts_per_hour
        self._restart_delay_s = restart_delay_s
        self._now_s = now_s
        self._deaths_s: deque[float] = deque()  # those of the last hour
        self._process: asyncio.subprocess.Process | None = None

    async def keep_alive(self) -> None:
        """Start the process, and restart it whenever it dies. Raises SupervisionError when it dies too often."""
        while True:
            code = await self._run_once()
            if code == 0 and self.spec.may_end:
                self.state = ProcessState.ENDED
                self.ended.set()
                return
            self.state = ProcessState.RESTARTING
            if code == ExitCode.UNUSABLE:
                raise CannotRunHere(f"{self.spec.name} cannot run here; {self.last_log_line()}")
            self.num_restarts += 1
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            now_s = self._now_s()
            self._deaths_s.append(now_s)
            while self._deaths_s[0] <= now_s - _HOUR_S:
                self._deaths_s.popleft()
            num_deaths = len(self._deaths_s)
            if num_deaths > self._max_restarts:
                raise SupervisionError(
                    f"{self.spec.name} died {num_deaths} times within an hour, last with {how}; {self.last_log_line()}"
                )
            reason = {"reason": self.last_log_line()}
            log.warning("%s died with %s and is started again", self.spec.name, how, extra=reason)
            await asyncio.sleep(self._restart_delay_s)

    async def _run_once(self) -> int:
        with self.spec.log_file.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-IS",
                str(PARENT_DEATH),
                str(os.getpid()),
                *self.spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **self.spec.environment},
            )
        self.pid = self._process.pid
        self.state = ProcessState.RUNNING
        code = await self._process.wait()
        # Remaining processes of the group would conflict with the restarted one.
        self.signal_group(signal.SIGKILL)
        return code

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process group of the process."""
        if self.pid:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                pass
            except PermissionError:
                log.warning("the processes of %s may not be signalled", self.spec.name)

    def terminate(self) -> None:
        """Send SIGTERM to the process but not to its group, because each service stops its own children."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    async def wait(self) -> None:
        """Wait until the current process has exited."""
        if self._process is not None:
            await self._process.wait()

    def last_log_line(self) -> str:
        """The last line of its log."""
        try:
            lines = self.spec.log_file.read_text(encoding="utf8", errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return f"the last line of {self.spec.log_file}: {lines[-1][:300] if lines else '(none)'}"


class Supervisor:
    """The processes of one run."""

    def __init__(
        self,
        *,
        max_restarts_per_hour: int = 10,
        restart_delay_s: float = 0.5,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_restarts = max_restarts_per_hour
        self._restart_delay_s = restart_delay_s
        self._now_s = now_s
        self._processes: dict[str, SupervisedProcess] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}

    @property
    def processes(self) -> list[SupervisedProcess]:
        """All processes, in order of their start."""
        return list(self._processes.values())

    def start(self, spec: ProcessSpec) -> SupervisedProcess:
        """Start a process and keep it alive. Raises SupervisionError when the name is taken."""
        if spec.name in self._processes:
            raise SupervisionError(f"{spec.name} is supervised already")
        process = SupervisedProcess(spec, self._max_restarts, self._restart_delay_s, self._now_s)
        self._processes[spec.name] = process
        self._keepers[spec.name] = asyncio.create_task(process.keep_alive(), name=f"keep {spec.name}")
        return process

    def check(self) -> None:
        """Raises the SupervisionError of a process that could not be kept alive."""
        for keeper in self._keepers.values():
            if keeper.done() and not keeper.cancelled():
                keeper.result()

    async def close(self, grace_s: float = 3.0) -> None:
        """Stop all processes, the latest first: SIGTERM, `grace_s` seconds, then SIGKILL to every group."""
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        running = [p for p in reversed(self.processes) if p.state is not ProcessState.ENDED]
        for process in running:
            process.terminate()
        waits = [asyncio.ensure_future(process.wait()) for process in running]
        if waits:
            await asyncio.wait(waits, timeout=grace_s)
        for process in running:
            process.signal_group(signal.SIGKILL)
            process.state = ProcessState.STOPPED
        await asyncio.gather(*waits)


def wait_passively() -> None:
    """Set this for the process, unless its environment sets another value. Call it before torch is imported."""
    for name, value in SHARED_CORES.items():
        os.environ.setdefault(name, value)
