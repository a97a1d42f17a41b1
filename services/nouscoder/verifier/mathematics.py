"""Whether answers are mathematically the same, asked of the math-verify library in a process of its own.

A process of the service's own user, not a sandbox: it runs no candidate's code, only reads text, under limits of
memory, CPU and wall time. One process a submission, because a parser that has met hostile text is not used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import sys
from pathlib import Path

from nouscoder.submission import MathTests
from nouscoder.verdict import VerdictKind
from nouscoder.verifier.judges.partners import Ruling
from nouscoder.verifier.sandbox.base import SandboxError

_WORKER = Path(__file__).with_name("math_worker.py")
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
_START_S = 20.0  # loading sympy on a busy machine
_MAX_ANSWER_CHARS = 4000
_LATE = Ruling(VerdictKind.TIME_LIMIT_EXCEEDED, "the answer could not be compared in time")


def is_installed() -> bool:
    """Whether math tests can be graded here."""
    return importlib.util.find_spec("math_verify") is not None


async def rule(tests: MathTests, answer: str, limit_s: float) -> list[Ruling]:
    """A ruling for each case, within about `limit_s` seconds for all. Raises SandboxError when the process fails.

    Only the end of a long answer is read: that is where the result stands.
    """
    answer = answer[-_MAX_ANSWER_CHARS:].encode("utf8", "replace").decode("utf8")
    request = {"gold": [case.expected for case in tests.cases], "answer": answer, "cpu_time_s": limit_s + _START_S}
    code, said = await _ask(json.dumps(request).encode(), limit_s + _START_S)
    if code is None or code < 0:
        return [_LATE] * len(tests.cases)
    if code != 0:
        raise SandboxError(f"comparing mathematics failed with exit code {code}")
    return [_ruling(right) for right in json.loads(said)["right"]]


def _ruling(right: bool | None) -> Ruling:
    if right is None:
        return Ruling(VerdictKind.INTERNAL_ERROR, "the expected answer cannot be read as mathematics")
    return Ruling(VerdictKind.ACCEPTED if right else VerdictKind.WRONG_ANSWER)


async def _ask(request: bytes, limit_s: float) -> tuple[int | None, bytes]:
    """(exit code, or None when it was killed for taking too long; what it printed)."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        str(_WORKER),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=_ENVIRONMENT,
        cwd="/",
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(limit_s):
            said, _ = await process.communicate(request)
        return process.returncode, said
    except TimeoutError:
        return None, b""
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
