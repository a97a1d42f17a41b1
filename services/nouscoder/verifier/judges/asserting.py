"""Assert tests: Python statements that run after the code, in the same process.

This type is weaker than the others because a case runs in the process of the code: the code can read the case, and an
object whose `__eq__` always returns True satisfies `==`. Use call tests for code that may cheat.

An outcome is accepted only when the process reports that the case ended, together with a random token of this test that
exists only in the memory of the process. An early exit with code 0, printed text, or "true" written to inherited
descriptors is therefore not accepted. A program that searches its interpreter for the token, or replaces builtins that
the case uses, is not detected.
"""

from __future__ import annotations

import json
import secrets

from nouscoder.domain.submission import AssertTests
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.judges.base import encoded, readable, size_of
from nouscoder.verifier.judges.python_syntax import is_short, require_python
from nouscoder.verifier.sandbox.base import RunResult

_ENTRY = "__nouscoder_case__"
# Appended after the code. The last definition of the name counts, so the code cannot replace it.
_ENDING = f"""

def {_ENTRY}(case, token):
    import traceback
    try:
        exec(compile(case, "<test>", "exec"), globals())
    except AssertionError:
        traceback.print_exc()
        return False
    return [token, True]
"""


class AssertJudge:
    """The judge of assert tests. Raises InvalidSubmission naming a case, or the setup, that is not Python.

    It checks only short tests; `python_syntax.require_long_python` checks long ones.
    """

    entry_point: str | None = _ENTRY

    def __init__(self, tests: AssertTests, prelude: str = "") -> None:
        if is_short(tests):
            require_python(tests)
        self._cases = tests.cases
        self._tokens = [secrets.token_hex(16) for _ in tests.cases]
        self.prelude = f"{prelude}\n{tests.setup}" if tests.setup else prelude
        self.num_tests = len(tests.cases)

    def source(self, code: str) -> str:
        """The code, followed by the function that runs a case."""
        return code + _ENDING

    def input_size(self, index: int) -> int:
        """The number of characters of the case."""
        return size_of(self._cases, index)

    def stdin(self, index: int) -> bytes:
        """The case and its token as arguments."""
        return json.dumps({"args": [self._cases[index], self._tokens[index]], "kwargs": {}}).encode()

    def arguments(self, index: int) -> tuple[str, ...]:
        """None."""
        return ()

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
