"""Checks that the texts of assert tests are Python. Long texts are parsed in a process of their own.

INVARIANT: this process parses at most INLINE_CHARS of one submission. The parser holds the interpreter lock, and some
texts of 200,000 characters take it ten seconds.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import sys

from nouscoder.domain.submission import AssertTests, Submission
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.sandbox.base import SandboxError

INLINE_CHARS = 8_000
_CPU_LIMIT_S = 5
_MEMORY_BYTES = 1 << 30
_WALL_LIMIT_S = 60.0
_REFUSED = (SyntaxError, ValueError, RecursionError, MemoryError)
# Reads a JSON list of texts. Prints [index, reason] of the first that is not Python, or null.
_PROGRAM = """
import ast, json, resource, sys
memory_bytes, cpu_s = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
for index, text in enumerate(json.load(sys.stdin)):
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        print(json.dumps([index, str(error)]))
        break
else:
    print("null")
"""


def is_short(tests: AssertTests) -> bool:
    """Whether this process may parse the texts itself."""
    return sum(map(len, _texts(tests))) <= INLINE_CHARS


def require_python(tests: AssertTests) -> None:
    """Raises InvalidSubmission that names the setup, or the first case, that is not Python. Only for short tests."""
    for index, text in enumerate(_texts(tests)):
        try:
            ast.parse(text)
        except _REFUSED as error:
            raise InvalidSubmission(_field(index), f"is not python: {error}") from None


async def require_long_python(submission: Submission) -> None:
    """Like `require_python`, in another process, for assert tests that are not short.

    The process starts in 10 ms and has 5 s of CPU time. Raises InvalidSubmission, and SandboxError when it fails.
    """
    tests = submission.tests
    if not isinstance(tests, AssertTests) or is_short(tests):
        return
    texts = json.dumps(_texts(tests)).encode()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", _PROGRAM, str(_MEMORY_BYTES), str(_CPU_LIMIT_S),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        env={}, cwd="/", start_new_session=True,
    )  # fmt: skip
    try:
        async with asyncio.timeout(_WALL_LIMIT_S):
            answer, _ = await process.communicate(texts)
    except TimeoutError:
        raise SandboxError("the tests could not be parsed in time") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())
    if process.returncode != 0:
        raise InvalidSubmission("tests", f"takes python's parser more than {_CPU_LIMIT_S} s or too much memory")
    if (found := json.loads(answer)) is not None:
        raise InvalidSubmission(_field(found[0]), f"is not python: {found[1]}")


def _texts(tests: AssertTests) -> list[str]:
    """The texts that must be Python. With a module the cases are names."""
    return [tests.setup] if tests.module else [tests.setup, *tests.cases]


def _field(index: int) -> str:
    return "tests.setup" if index == 0 else f"tests.cases[{index - 1}]"
