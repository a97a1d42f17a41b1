"""Math tests: answers are compared by the math-verify library, in processes beside the service.

INVARIANT: a MathProcess has at most one process of math_worker.py, which is killed with its forks when it is silent
past its limits. What an answer causes is a ruling on that answer, never a SandboxError.

The processes run as the service's own user and not in a sandbox: they run no candidate code. They only parse text,
within limits of memory, CPU and wall time (see math_worker). They start with the first request.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nouscoder.domain.submission import MathCase, MathTests
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.judges import math_worker
from nouscoder.verifier.judges.judge import Judge, readable
from nouscoder.verifier.judges.math_worker import Code, End, MathRequest
from nouscoder.verifier.judges.rulings import Ruling
from nouscoder.verifier.sandbox.base import RunResult, SandboxError
from nouscoder.verifier.sandbox.cgroup import Groups, IdleGroup

log = logging.getLogger(__name__)

_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
_GRACE_S = 60.0  # time to load sympy on a busy machine
_MAX_ANSWER_CHARS = 4000
_MAX_LINE_BYTES = 1 << 20
_NO_MEMORY = Ruling(
    VerdictKind.MEMORY_LIMIT_EXCEEDED,
    f"comparing the answer needs more than {math_worker.MEMORY_BYTES >> 20} MiB of memory",
)
_FAILED = Ruling(VerdictKind.WRONG_ANSWER, "the math library cannot compare this answer")
_RULINGS = {
    Code.EQUAL: Ruling(VerdictKind.ACCEPTED),
    Code.DIFFERENT: Ruling(VerdictKind.WRONG_ANSWER),
    Code.INVALID_GOLD: Ruling(VerdictKind.INTERNAL_ERROR, "the expected answer cannot be parsed as mathematics"),
    Code.NO_MEMORY: _NO_MEMORY,
    Code.FAILED: _FAILED,
}
_KILLED_BY_ANSWER = 2  # one may be due to the machine


def is_installed() -> bool:
    """Whether math tests can be graded here."""
    return importlib.util.find_spec("math_verify") is not None


@dataclass(frozen=True, slots=True)
class MathLimits:
    """The limits of one comparison, in CPU time and in wall time, which only a very busy machine reaches first.

    `total_s` is the CPU time of all comparisons of a submission. `niceness` lowers their priority. Those with one begin
    in an idle group, where there is one.
    """

    cpu_s: float = 3.0
    wall_s: float = 60.0
    total_s: float = 600.0
    niceness: int = 12  # 7 % of a CPU that a program uses too


QUICK = MathLimits(cpu_s=0.25, wall_s=10.0, total_s=0.25, niceness=0)  # most comparisons take a hundredth of it


@dataclass(frozen=True, slots=True)
class Compared:
    """The outcomes of a submission's comparisons so far, and why no more of them are there."""

    codes: tuple[Code, ...] = ()
    end: End = End.LATE


async def compare(
    process: MathProcess, tests: MathTests, answer: str, limits: MathLimits, before: Compared | None = None
) -> Compared:
    """Compare `answer` with each gold answer that is not among those `before`. Raises SandboxError.

    Of a long answer only the end is compared, because the result is there. No case after a comparison that was too
    late is compared.
    """
    answer = answer[-_MAX_ANSWER_CHARS:].encode("utf8", "replace").decode("utf8")
    before = before or Compared()
    golds = [case.expected for case in tests.cases[len(before.codes) :]]
    for _ in range(_KILLED_BY_ANSWER):
        made = await process.compare(golds, answer, limits)
        if made.end is not End.KILLED:
            break
    return Compared(before.codes + made.codes, made.end)


def rulings_of(compared: Compared, num_tests: int, limits: MathLimits) -> list[Ruling]:
    """The ruling on each case."""
    late = Ruling(VerdictKind.TIME_LIMIT_EXCEEDED, f"the answer could not be compared in {limits.cpu_s:g} s")
    missing = {End.LATE: late, End.KILLED: _NO_MEMORY}.get(compared.end, _FAILED)
    return [*(_RULINGS[code] for code in compared.codes), *[missing] * (num_tests - len(compared.codes))]


class MathProcess:
    """The process of math_worker.py. Used by one event loop, by any number of tasks at a time."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._replies: dict[int, asyncio.Future[Compared]] = {}  # of the process that runs
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()
        self._idle: IdleGroup | None = None  # made with the first process, removed at the end
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The pid while it runs."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def compare(self, golds: list[str], answer: str, limits: MathLimits) -> Compared:
        """The outcomes of the comparisons, and why they ended. Raises SandboxError when the process dies or is silent.

        A cancelled comparison is killed.
        """
        process = await self._running()
        assert process.stdin is not None
        number, replies = next(self._numbers), self._replies
        idle = [self._idle.procs, self._idle.own] if self._idle is not None and limits.niceness else []
        request = MathRequest(number, golds, answer, limits.cpu_s, limits.wall_s, limits.total_s, limits.niceness, idle)
        reply: asyncio.Future[Compared] = asyncio.get_running_loop().create_future()
        replies[number] = reply
        try:
            async with asyncio.timeout(limits.total_s + limits.wall_s + _GRACE_S):
                process.stdin.write(json.dumps(request._asdict()).encode() + b"\n")
                await process.stdin.drain()
                return await reply
        except asyncio.CancelledError:
            process.stdin.write(b'{"id": %d}\n' % number)
            raise
        except (OSError, TimeoutError) as error:
            await self._stop()
            raise SandboxError(f"comparing mathematics failed: {error!r}") from error
        finally:
            del replies[number]

    async def close(self) -> None:
        """Kill the process with its forks, if it runs, and wait for it. No other one starts."""
        self._is_closed = True
        await self._stop()
        if self._idle is not None:
            self._idle.remove()
            self._idle = None

    async def _stop(self) -> None:
        process, reading = self._process, self._reading
        self._process = self._reading = None
        if process is None or reading is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # its forks end with it
        await process.wait()
        await reading

    async def _running(self) -> asyncio.subprocess.Process:
        """The process, which is started if there is none. Raises SandboxError."""
        async with self._starting:
            if self._is_closed:
                raise SandboxError("comparing mathematics failed: the service stops")
            if self._process is None or self._process.returncode is not None:
                await self._stop()
                self._idle = self._idle or Groups().make_idle()
                try:
                    self._process = await asyncio.create_subprocess_exec(
                        *(sys.executable, "-I", str(Path(math_worker.__file__))),
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                        stderr=asyncio.subprocess.DEVNULL,
                        env=_ENVIRONMENT,
                        cwd="/",
                        start_new_session=True,
                        limit=_MAX_LINE_BYTES,
                    )
                except OSError as error:
                    raise SandboxError(f"comparing mathematics failed: {error}") from error
                self._replies = {}
                self._reading = asyncio.create_task(_read(self._process, self._replies), name="mathematics")
            return self._process


async def _read(process: asyncio.subprocess.Process, replies: dict[int, asyncio.Future[Compared]]) -> None:
    """Pass on the answers until the process ends. Those that are still awaited then fail."""
    assert process.stdout is not None
    try:
        while line := await process.stdout.readline():
            told = json.loads(line)
            reply = replies.get(told["id"])
            if reply is not None and not reply.done():
                reply.set_result(Compared(tuple(map(Code, told["codes"])), End(told["end"])))
    except ValueError as error:
        log.error("the process of mathematics gave an invalid answer", extra={"detail": str(error)})
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        for reply in replies.values():
            if not reply.done():
                reply.set_exception(SandboxError("comparing mathematics failed: its process has ended"))


class MathJudge(Judge):
    """The judge of math tests, which run no process: it only shows the answer, the text of the submission."""

    _cases: Sequence[MathCase]

    def stdin(self, index: int) -> bytes:
        """Empty: no process runs."""
        return b""

    def answer_outcome(self, index: int, result: RunResult) -> VerdictKind:
        """A wrong answer. Only the math library's ruling accepts an answer."""
        return VerdictKind.WRONG_ANSWER

    def shown(self, index: int, result: RunResult) -> tuple[str, str, str]:
        """No input, the gold answer, the submitted answer."""
        return "", self._cases[index].expected, readable(result.stdout)
