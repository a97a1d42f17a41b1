"""A process that compares answers with gold answers by the math-verify library, each answer in a fork of its own.

INVARIANT: untrusted text is parsed in forks only. A fork that passes a limit is killed, and so is each that is left
when this process ends.

`judges.mathematics` starts this process. A request is one line of JSON, the fields of `MathRequest`. Its answer is one
line, `{"id": ID, "codes": "10?", "end": END}` with one code for each gold answer that was compared, in their order (see
`Code`). `{"id": ID}` alone kills the fork of an earlier request, which then has no answer. Any number of requests is
answered at the same time, in any order. The CPU time of a fork decides and not the wall time, so that the end does not
depend on what else the machine does; the wall time has a wide limit of its own.

A fork executes nothing of an answer except what sympy builds from digits, operators and parentheses. This file imports
nothing of the project, because it is started by its path.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import re
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, NamedTuple

MEMORY_BYTES = 512 * 1024**2  # of a fork, beside what the library itself takes
_FILE_BYTES = 1 << 20
_LOOK_EVERY_S = 0.05
_IDLE_S = 6.0  # then a comparison gets the share of its niceness, so that its end does not depend on the machine's work
_READ_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1
_TRIES = 20
# A number as programs write it, which the library reads as a product with Euler's number.
_E_NOTATION = re.compile(r"^\s*([+-]?\d+\.?\d*)[eE]([+-]?\d+)\s*$", re.ASCII)


class Code(StrEnum):
    """The outcome of one comparison. INVALID_GOLD: the gold answer cannot be parsed."""

    EQUAL = "1"
    DIFFERENT = "0"
    INVALID_GOLD = "?"
    NO_MEMORY = "M"
    FAILED = "E"


class End(StrEnum):
    """Why a fork has ended. After another end than DONE, codes are missing. KILLED: by somebody else."""

    DONE = "done"
    LATE = "late"
    KILLED = "killed"
    CRASHED = "crashed"


class MathRequest(NamedTuple):
    """The comparison of `answer` with each of `golds`.

    `cpu_s` and `wall_s` bound each comparison, `total_s` is the CPU time of all together. `niceness`: see nice(2).
    `idle`: the files `procs` and `own` of an idle group (sandbox/cgroup.py), in which it begins; empty: nowhere.
    """

    id: int
    golds: list[str]
    answer: str
    cpu_s: float
    wall_s: float
    total_s: float
    niceness: int
    idle: list[str]


class Fork:
    """A running fork and the codes that it has sent."""

    def __init__(self, request: MathRequest, pid: int, pipe: int) -> None:
        self.pid = pid
        self.pipe = pipe
        self._request = request
        self._own = request.idle[1:]
        self._codes = ""
        self._end: End | None = None
        self._since_s = self._begun_s = time.monotonic()
        self._since_cpu_s = 0.0

    def look(self) -> None:
        """Kill it if it has taken too long. Take it out of the idle group after a while."""
        if self._end is not None:
            return
        cpu_s, now_s = cpu_time_s(self.pid), time.monotonic()
        asked = self._request
        if self._own and now_s - self._begun_s > _IDLE_S:
            _move(self.pid, self._own.pop())
        is_late = cpu_s - self._since_cpu_s > asked.cpu_s or now_s - self._since_s > asked.wall_s
        if is_late or cpu_s > asked.total_s or now_s - self._begun_s > asked.total_s + asked.wall_s:
            self._end = End.LATE
            os.kill(self.pid, signal.SIGKILL)

    def read(self) -> str | None:
        """Take what it has sent. Returns the answer to the request when the fork has ended."""
        sent = os.read(self.pipe, _READ_BYTES)
        if sent:
            self._codes += sent.decode()
            self._since_s, self._since_cpu_s = time.monotonic(), cpu_time_s(self.pid)
            return None
        status = self.reap()
        end = self._end or _end_of(status, is_whole=len(self._codes) == len(self._request.golds))
        return json.dumps({"id": self._request.id, "codes": self._codes, "end": end})

    def reap(self) -> int:
        """Wait for the end of the process, which has been killed or has closed its pipe. Returns its status."""
        os.close(self.pipe)
        return os.waitpid(self.pid, 0)[1]


def cpu_time_s(pid: int) -> float:
    """The CPU time of a process that has not been reaped."""
    return time.clock_gettime(~pid << 3 | 2)  # see clock_getcpuclockid(3)


def _end_of(status: int, *, is_whole: bool) -> End:
    if is_whole:
        return End.DONE
    if not os.WIFSIGNALED(status):
        return End.CRASHED
    return {int(signal.SIGKILL): End.KILLED, int(signal.SIGXCPU): End.LATE}.get(os.WTERMSIG(status), End.CRASHED)


def main() -> None:
    """Answer requests until stdin ends."""
    list(compare([r"\frac{1}{2}"], "$0.5$"))  # so that the library is loaded and its caches are filled before the forks
    gc.collect()
    gc.freeze()
    forks: dict[int, Fork] = {}
    try:
        for line in _lines(forks):
            asked = json.loads(line)
            if len(asked) > 1:
                forks[asked["id"]] = _started(MathRequest(**asked))
            elif (fork := forks.pop(asked["id"], None)) is not None:
                os.kill(fork.pid, signal.SIGKILL)
                fork.reap()
    finally:
        for fork in forks.values():
            os.kill(fork.pid, signal.SIGKILL)


def _lines(forks: dict[int, Fork]) -> Iterator[bytes]:
    """The lines of stdin until its end. Serves the forks meanwhile."""
    begun = b""
    while True:
        by_pipe = {fork.pipe: number for number, fork in forks.items()}
        ready = select.select([0, *by_pipe], [], [], _LOOK_EVERY_S if forks else None)[0]
        for pipe in ready:
            if pipe and (answer := forks[by_pipe[pipe]].read()) is not None:
                del forks[by_pipe[pipe]]
                sys.stdout.write(answer + "\n")
                sys.stdout.flush()
        for fork in forks.values():
            fork.look()
        if 0 in ready:
            if not (sent := os.read(0, _READ_BYTES)):
                return
            *lines, begun = (begun + sent).split(b"\n")
            yield from lines


def _started(request: MathRequest) -> Fork:
    read_end, write_end = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        _compare_in_fork(request, write_end, parent)
    os.close(write_end)
    return Fork(request, pid, read_end)


def _compare_in_fork(request: MathRequest, write_end: int, parent: int) -> None:
    try:
        for procs in request.idle[:1]:
            _move(os.getpid(), procs)
        _lower(request.niceness)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):  # the codes leave through `write_end` only
            os.dup2(null, fd)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # the kernel kills this process first
        with open("/proc/self/statm") as file:
            held_bytes = int(file.read().split()[0]) * resource.getpagesize()
        for kind, limit in (
            (resource.RLIMIT_AS, held_bytes + MEMORY_BYTES),
            (resource.RLIMIT_CPU, int(request.total_s + request.cpu_s) + 1),
            (resource.RLIMIT_FSIZE, _FILE_BYTES),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(kind, (limit, limit + 1))
        for code in compare(request.golds, request.answer):
            os.write(write_end, code.encode())
    finally:
        os._exit(0)


def _move(pid: int, procs: str) -> None:
    """Move a process to a group. Where that is refused, its niceness alone counts."""
    with contextlib.suppress(OSError), open(procs, "w") as file:
        file.write(str(pid))


def _lower(niceness: int) -> None:
    """Lower the priority of this process.

    Some kernels share the CPUs between sessions, so that it counts only within its own (sched(7), autogroup).
    """
    os.setsid()
    os.nice(niceness)
    for _ in range(_TRIES if niceness else 0):
        try:
            with open("/proc/self/autogroup", "w") as file:
                file.write(str(niceness))
        except BlockingIOError:  # a service that is not root may do it ten times a second
            time.sleep(_LOOK_EVERY_S)
        except OSError:  # the kernel does not
            return
        else:
            return


def compare(golds: list[str], answer: str) -> Iterator[Code]:
    """For each gold answer whether `answer` equals it."""
    from math_verify import parse, verify

    parsed: Any = None
    answer_code = Code.DIFFERENT
    try:
        parsed = parse(answer, parsing_timeout=None)
    except MemoryError:
        answer_code = Code.NO_MEMORY
    except Exception:  # the library raises many types
        answer_code = Code.FAILED
    for gold in golds:
        try:
            # The library parses a bare expression as LaTeX only inside dollar signs. `\$` is money.
            is_latex = "$" in gold.replace("\\$", "") or "\\boxed" in gold
            latex, same = _E_NOTATION.subn(r"\1 \\cdot 10^{\2}", gold)
            expected = parse(gold if is_latex else f"${latex}$", parsing_timeout=None) + same * [gold.strip()]
        except Exception:
            expected = []
        if not expected:
            yield Code.INVALID_GOLD
        elif parsed is None:
            yield answer_code
        else:
            yield _compared(verify, expected, parsed)


def _compared(verify: Any, expected: Any, parsed: Any) -> Code:
    try:
        return Code.EQUAL if verify(expected, parsed, timeout_seconds=None) else Code.DIFFERENT
    except MemoryError:
        return Code.NO_MEMORY
    except Exception:
        return Code.FAILED


if __name__ == "__main__":
    main()
