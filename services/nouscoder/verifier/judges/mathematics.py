"""Math tests: answers are compared by the math-verify library, which runs in a separate process.

INVARIANT: at most one such process lives at a time. A process that is silent past its limit is killed.

The process runs as the service's own user and not in a sandbox: it runs no candidate code. It only parses text, within
limits of memory, CPU and wall time (see math_worker). It starts with the first request and ends with the service.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import select
import subprocess
import sys
import threading
from pathlib import Path

from nouscoder.domain.submission import MathTests
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.judges.judge import readable
from nouscoder.verifier.judges.rulings import Ruling
from nouscoder.verifier.sandbox.base import RunResult, SandboxError

_WORKER = Path(__file__).with_name("math_worker.py")
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
_GRACE_S = 25.0  # time to load sympy on a busy machine
_MAX_ANSWER_CHARS = 4000
_LATE = Ruling(VerdictKind.TIME_LIMIT_EXCEEDED, "the answer could not be compared in time")


def is_installed() -> bool:
    """Whether math tests can be graded here."""
    return importlib.util.find_spec("math_verify") is not None


async def rule(tests: MathTests, answer: str, limit_s: float) -> list[Ruling]:
    """A ruling for each case, within `limit_s` seconds in total. Raises SandboxError when the process fails.

    Of a long answer only the end is compared, because the result is there.
    """
    answer = answer[-_MAX_ANSWER_CHARS:].encode("utf8", "replace").decode("utf8")
    request = json.dumps({"gold": [case.expected for case in tests.cases], "answer": answer})
    reply = await asyncio.to_thread(_PROCESS.ask, f"{limit_s:.3f} {request}\n".encode(), limit_s)
    if "late" in reply:
        return [_LATE] * len(tests.cases)
    if "right" not in reply:
        raise SandboxError(f"comparing mathematics failed: {reply}")
    return [_ruling(right) for right in reply["right"]]


def _ruling(right: bool | None) -> Ruling:
    if right is None:
        return Ruling(VerdictKind.INTERNAL_ERROR, "the expected answer cannot be parsed as mathematics")
    return Ruling(VerdictKind.ACCEPTED if right else VerdictKind.WRONG_ANSWER)


class MathProcess:
    """The process of math_worker.py. It handles one request at a time and may be shared between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: bytes, limit_s: float) -> dict[str, list[bool | None]]:
        """Send one line and return the answer. Raises SandboxError when the process dies or stays silent."""
        with self._lock:
            try:
                process = self._running()
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(request)
                process.stdin.flush()
                ready, _, _ = select.select([process.stdout], [], [], limit_s + _GRACE_S)
                answer: dict[str, list[bool | None]] = json.loads(process.stdout.readline() if ready else b"")
            except (OSError, ValueError) as error:
                self.stop()
                raise SandboxError(f"comparing mathematics failed: {error!r}") from error
            return answer

    def stop(self) -> None:
        """Kill the process, if it runs, and wait for it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        return self._process


_PROCESS = MathProcess()


class MathJudge:
    """The judge of math tests, which run no process: it only shows the answer, the text of the submission."""

    entry_point: str | None = None
    prelude = ""

    def __init__(self, tests: MathTests) -> None:
        self._cases = tests.cases
        self.num_tests = len(tests.cases)

    def source(self, code: str) -> str:
        """The answer."""
        return code

    def input_size(self, index: int) -> int:
        """The same for all tests."""
        return 0

    def stdin(self, index: int) -> bytes:
        """Empty: no process runs."""
        return b""

    def arguments(self, index: int) -> tuple[str, ...]:
        """None."""
        return ()

    def answer_outcome(self, index: int, result: RunResult) -> VerdictKind:
        """A wrong answer. Only the math library's ruling accepts an answer."""
        return VerdictKind.WRONG_ANSWER

    def shown(self, index: int, result: RunResult) -> tuple[str, str, str]:
        """No input, the gold answer, the submitted answer."""
        return "", self._cases[index].expected, readable(result.stdout)
