"""What every bench needs: its error, the services that it starts, and the CPU time and memory of processes."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from nouscoder.errors import NousCoderError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_LAST_LINES, _LINE_BYTES = 20, 1 << 20
LogRecord = dict[str, Any]


class BenchError(NousCoderError):
    """The bench could not run, or an answer under load was wrong. The message says which."""


def as_record(result: DataclassInstance) -> dict[str, Any]:
    """The figures for scripts: the fields of a result, and the properties of its class."""
    properties = [name for name, value in vars(type(result)).items() if isinstance(value, property)]
    return {**asdict(result), **{name: getattr(result, name) for name in properties}}


def p99(ordered: Sequence[float]) -> float:
    """The value that 99 % of these are not above."""
    return ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]


class Machine:
    """The machine since the object was made. `load_average` is that of the minute before."""

    def __init__(self) -> None:
        self.num_cores = os.cpu_count() or 1
        self.load_average = os.getloadavg()[0]
        self._begun_s, self._stolen_s = time.monotonic(), _stolen_s()

    @property
    def stolen_share(self) -> float:
        """The share of CPU that the hypervisor gave to other machines."""
        return (_stolen_s() - self._stolen_s) / ((time.monotonic() - self._begun_s) * self.num_cores)


def _stolen_s() -> float:
    return float(psutil.cpu_times().steal)


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds of a process and of its descendants (ended ones too), and the memory that they hold in total.

    A page of memory that n processes share counts 1/n for each.
    """

    own_cpu_s: float
    children_cpu_s: float
    memory_bytes: int


def usage_of(pid: int, own_module: str = "") -> Usage:
    """The current usage. Processes that end while they are read count as ended before.

    With `own_module`, descendants that run that module count as the process itself.
    """
    own_s = all_s = 0.0
    memory_bytes = 0
    for process in _tree(pid):
        try:
            times, command = process.cpu_times(), process.cmdline()
            memory_bytes += process.memory_full_info().pss
        except psutil.Error:
            continue
        spent_s = times.user + times.system
        all_s += spent_s + times.children_user + times.children_system
        if process.pid == pid or (own_module and own_module in command):
            own_s += spent_s
    return Usage(own_s, all_s - own_s, memory_bytes)


def _tree(pid: int) -> list[psutil.Process]:
    """The process and its descendants; nothing when it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def peak_resident_bytes(pid: int) -> int:
    """The peak resident memory of a running process."""
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


@asynccontextmanager
async def started(
    command: Sequence[str],
    port: str,
    limit_s: float,
    ended: str,
    late: str,
    told: Callable[[LogRecord], None] = lambda record: None,
) -> AsyncIterator[tuple[int, str]]:
    """Start a service. Yields its pid and its address, when its log says that it listens on this kind of port.

    `told` gets every record of the log. Raises BenchError: `ended` when it ends first, in which {log} are its last
    lines, and `late` when that or what is done with it takes too long.
    """
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, limit=_LINE_BYTES)
    assert process.stderr is not None
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def read(stream: asyncio.StreamReader) -> None:
        last: deque[str] = deque(maxlen=_LAST_LINES)
        async for line in stream:
            last.append(line.decode(errors="replace"))
            record = None
            with suppress(ValueError):  # lines of libraries
                record = json.loads(line)
            if not isinstance(record, dict):
                continue
            if port in record and not ready.done():
                ready.set_result(record[port])
            told(record)
        if not ready.done():
            ready.set_exception(BenchError(ended.format(log="".join(last))))

    reading = asyncio.create_task(read(process.stderr))
    try:
        yield process.pid, await asyncio.wait_for(ready, limit_s)
    except TimeoutError:
        raise BenchError(late) from None
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
