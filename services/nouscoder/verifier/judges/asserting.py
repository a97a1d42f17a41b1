"""Assert tests: Python statements that run after the code, in the same process; or a file of tests for pytest.

This type is weaker than the others because a case runs in the process of the code: the code can read the case, and an
object whose `__eq__` always returns True satisfies `==`. Use call tests for code that may cheat.

An outcome is accepted only when the process reports that the case ended, together with a random token of this test that
exists only in the memory of the process. An early exit with code 0, printed text, or "true" written to inherited
descriptors is therefore not accepted. A program that searches its interpreter for the token, or replaces builtins that
the case uses, is not detected.

A case that calls only what the prelude or the setup brought, such as `gcd` of math, is no test of the code: it is a
NameError, unless the setup imports it by name and it may see what the code has left (harness/program_names.py).

The code is executed as if it were imported (harness/candidate.py), so its main guard does not run.

In a file for pytest one test function is one case, with all its parameters. The code is the module that the file
imports (`tests.module`). Each case is a process of its own, in which pytest runs only
that function. To start pytest takes a part of a second, so the limits are larger by START_S and START_BYTES.

INVARIANT: this process parses at most INLINE_CHARS of one submission. The parser holds the interpreter lock, and some
texts of 200,000 characters take it ten seconds, so longer texts are parsed in a process of their own.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from nouscoder.domain.submission import TOKEN, AssertTests, CallTests, Limits
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.harness.frames import JUDGE
from nouscoder.verifier.judges.judge import Judge, encoded, readable, with_setup
from nouscoder.verifier.sandbox.base import RunResult, SandboxError

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
# Before the code. The harness takes the function away before the code runs, and what it uses has builtins of its own.
_CASE = f"""
def {JUDGE}(case, token):
    try:
        exec(names.require_use(compile(case, "<test>", "exec")), program)
    except AssertionError:
        print_exc()
        return False
    return [token, True]
"""
_APART = f"""
{JUDGE} = type({JUDGE})({JUDGE}.__code__, {{
    "__builtins__": {{**vars(__import__("builtins"))}},
    "print_exc": __import__("traceback").print_exc,
    "program": globals(),
}})
"""
START_S = 3.0
START_BYTES = 128 * 1024**2


def is_short(tests: AssertTests | CallTests) -> bool:
    """Whether this process may parse the texts itself."""
    return sum(map(len, _texts(tests))) <= INLINE_CHARS


def require_python(tests: AssertTests | CallTests) -> None:
    """Raises InvalidSubmission that names the setup, or the first case, that is not Python. Only for short tests."""
    for index, text in enumerate(_texts(tests)):
        try:
            ast.parse(text)
        except _REFUSED as error:
            raise InvalidSubmission(_field(index), f"is not python: {error}") from None


async def require_long_python(tests: AssertTests | CallTests) -> None:
    """Like `require_python`, in another process, for tests that are not short.

    The process starts in 10 ms and has 5 s of CPU time. Raises InvalidSubmission, and SandboxError when it fails.
    """
    if is_short(tests):
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


def _texts(tests: AssertTests | CallTests) -> list[str]:
    """The texts that must be Python. With a module the cases are names."""
    return [tests.setup, *tests.cases] if isinstance(tests, AssertTests) and not tests.module else [tests.setup]


def _field(index: int) -> str:
    return "tests.setup" if index == 0 else f"tests.cases[{index - 1}]"


class AssertJudge(Judge):
    """The judge of assert tests. Raises InvalidSubmission naming a case, or the setup, that is not Python.

    It checks only short tests; `require_long_python` checks long ones.
    """

    entry_point = JUDGE
    _cases: Sequence[str]

    def __init__(self, tests: AssertTests, prelude: str = "") -> None:
        if is_short(tests):
            require_python(tests)
        super().__init__(tests.cases, _CASE + _APART + with_setup(prelude, tests.setup))
        self._tokens = [secrets.token_hex(16) for _ in tests.cases]

    def stdin(self, index: int) -> bytes:
        """The case and its token as arguments."""
        return json.dumps({"args": [self._cases[index], self._tokens[index]], "kwargs": {}}).encode()

    def answer_outcome(self, index: int, result: RunResult) -> VerdictKind:
        """Accepted when the case ended, wrong answer after an AssertionError, else runtime error (no valid report)."""
        report = (result.result or b"").strip()
        token = self._tokens[index]
        if report == encoded(f'["{token}", true]'):
            return VerdictKind.ACCEPTED
        return VerdictKind.WRONG_ANSWER if report == b"false" else VerdictKind.RUNTIME_ERROR

    def shown(self, index: int, result: RunResult) -> tuple[str, str, str]:
        """The case, no expected output, and stdout."""
        return self._cases[index], "", readable(result.stdout)


class ProgramEndJudge(Judge):
    """The judge of assert tests in another language than Python: the only case is the end of the program.

    It is accepted with exit code 0, as by the authors of MultiPL-E. A case with TOKEN must print it as the last word:
    so a program that ends itself before the case is refused.
    """

    def __init__(self, tests: AssertTests) -> None:
        super().__init__(tests.cases)
        self._setup, self._end = tests.setup, tests.cases[0]
        self._token = secrets.token_hex(16) if TOKEN in self._end else ""

    def source(self, code: str) -> str:
        """The setup, the code and the case."""
        end = self._end.replace(TOKEN, self._token)
        return f"{self._setup}\n{code}\n{end}" if self._setup else f"{code}\n{end}"

    def stdin(self, index: int) -> bytes:
        """Nothing."""
        return b""

    def answer_outcome(self, index: int, result: RunResult) -> VerdictKind:
        """Accepted when all of the case has run; else runtime error (no valid report)."""
        has_ended = not self._token or result.stdout.split()[-1:] == [self._token.encode()]
        return VerdictKind.ACCEPTED if has_ended else VerdictKind.RUNTIME_ERROR

    def shown(self, index: int, result: RunResult) -> tuple[str, str, str]:
        """The case, no expected output, and stdout."""
        return self._end, "", readable(result.stdout)


class PytestJudge(AssertJudge):
    """The judge of assert tests with a module. Raises InvalidSubmission when the file is not Python."""

    def __init__(self, tests: AssertTests, prelude: str = "") -> None:
        super().__init__(tests)
        self._text = tests.setup
        imported = f'__import__("sys").modules[{tests.module!r}] = __import__("sys").modules["__main__"]'
        self.prelude = f"{_driver()}{_APART}{prelude}\n{imported}\n__name__ = {tests.module!r}\n"

    def stdin(self, index: int) -> bytes:
        """The name of the test, its token and the file as arguments."""
        return json.dumps({"args": [self._cases[index], self._tokens[index], self._text], "kwargs": {}}).encode()

    def run_limits(self, limits: Limits) -> Limits:
        """The limits with what pytest itself needs."""
        return replace(
            limits,
            wall_time_s=limits.wall_time_s + START_S,
            cpu_time_s=limits.cpu_time_s + START_S,
            memory_bytes=limits.memory_bytes + START_BYTES,
        )


@cache
def _driver() -> str:
    return Path(__file__).with_name("pytest_driver.py").read_text("utf-8").partition('"""\n\n\n')[2]
