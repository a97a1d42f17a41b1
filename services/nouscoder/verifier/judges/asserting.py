"""Assert tests: python statements that follow the code in its own process.

A case runs where the code runs, so this type is weaker than the others, by nature: what a case states is visible to
the code (it can look for it), and an object whose `__eq__` is always true satisfies `==`. Use call tests where the
code is not trusted to be honest. What is kept all the same: an outcome is `accepted` only when the process says that
the case was reached and ended, with a token drawn for this test that is nowhere but in the process's memory. Leaving
early with exit code 0, printing, or writing "true" to inherited descriptors proves nothing; a program that digs
through its own interpreter for the token, or replaces the builtins that the case uses, is not stopped.
"""

from __future__ import annotations

import ast
import json
import secrets

from nouscoder.domain.submission import AssertTests
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.judges.base import encoded, readable
from nouscoder.verifier.sandbox.base import RunResult

_ENTRY = "__nouscoder_case__"
# The last definition of the name counts, so the code cannot put its own there.
_ENDING = f"""

def {_ENTRY}(case, token):
    import traceback
    try:
        exec(compile(case, "<test>", "exec"), globals())
    except AssertionError:
        traceback.print_exc()
        return [token, False]
    return [token, True]
"""


class AssertJudge:
    """Raises InvalidSubmission naming a case, or the setup, that is not python."""

    entry_point: str | None = _ENTRY

    def __init__(self, tests: AssertTests, prelude: str = "") -> None:
        for index, case in enumerate(tests.cases):
            _require_python(case, f"tests.cases[{index}]")
        _require_python(tests.setup, "tests.setup")
        self._cases = tests.cases
        self._tokens = [secrets.token_hex(16) for _ in tests.cases]
        self.prelude = f"{prelude}\n{tests.setup}" if tests.setup else prelude
        self.num_tests = len(tests.cases)

    def source(self, code: str) -> str:
        """The code, and after it what runs a case."""
        return code + _ENDING

    def input_size(self, index: int) -> int:
        """Characters of the case."""
        return len(self._cases[index])

    def stdin(self, index: int) -> bytes:
        """The case and its token as arguments."""
        return json.dumps({"args": [self._cases[index], self._tokens[index]], "kwargs": {}}).encode()

    def answer_outcome(self, index: int, result: RunResult) -> VerdictKind:
        """Accepted when the case ended, a wrong answer after an AssertionError; no proof is a runtime error."""
        said = (result.result or b"").strip()
        token = self._tokens[index]
        if said == encoded(f'["{token}", true]'):
            return VerdictKind.ACCEPTED
        return VerdictKind.WRONG_ANSWER if said == encoded(f'["{token}", false]') else VerdictKind.RUNTIME_ERROR

    def shown(self, index: int, result: RunResult) -> tuple[str, str, str]:
        """The case, and what was printed; the case is all there is of an expectation."""
        return self._cases[index], "", readable(result.stdout)


def _require_python(text: str, field: str) -> None:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidSubmission(field, f"is not python: {error}") from None
