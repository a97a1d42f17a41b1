"""Assert tests that are a file of tests for pytest: one test function is one case, with all its parameters.

The code is the module that the file imports (`tests.module`), so its main guard does not run. Each case is a process of
its own, in which pytest runs only that function. To start pytest takes a part of a second, so the limits are larger by
START_S and START_BYTES. An outcome is proved as in asserting.py: by a token that only a test which has
ended returns. This type is as weak as assert tests: the code can read the tests.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

from nouscoder.domain.submission import AssertTests, Limits
from nouscoder.verifier.judges.asserting import AssertJudge

START_S = 3.0
START_BYTES = 128 * 1024**2


class PytestJudge(AssertJudge):
    """The judge of assert tests with a module. Raises InvalidSubmission when the file is not Python."""

    def __init__(self, tests: AssertTests, prelude: str = "") -> None:
        super().__init__(tests)
        self._text = tests.setup
        imported = f'__import__("sys").modules[{tests.module!r}] = __import__("sys").modules["__main__"]'
        self.prelude = f"{prelude}\n{imported}\n__name__ = {tests.module!r}\n"

    def source(self, code: str) -> str:
        """The code, followed by the function that runs a test."""
        return f"{code}\n\n{_driver()}"

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
