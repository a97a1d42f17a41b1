"""Whether candidates can import pytest, which tests with a module need.

INVARIANT: a sandbox is asked until it has once imported pytest, and never again. A sandbox without it refuses the
request, because the verdict of a candidate must not depend on it.
"""

from __future__ import annotations

import logging

from nouscoder.domain.submission import AssertTests, Limits, Submission
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.sandbox.base import Exit, Program, Sandbox
from nouscoder.verifier.toolchains.languages import installed

log = logging.getLogger(__name__)
_LIMITS = Limits(wall_time_s=60.0, cpu_time_s=60.0)


class PytestLibrary:
    """Asks the sandboxes of one grader."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._is_there = False

    async def require(self, submission: Submission) -> None:
        """Raises InvalidSubmission for tests with a module where pytest cannot be imported, and SandboxError."""
        if self._is_there or not isinstance(submission.tests, AssertTests) or not submission.tests.module:
            return
        async with self._sandbox.session(Program(installed()["python"], "import pytest", _LIMITS)) as session:
            result = await session.run(b"")
        if result.exit is not Exit.EXITED or result.exit_code:
            log.warning(
                "candidates cannot import pytest", extra={"detail": result.stderr[-500:].decode(errors="replace")}
            )
            raise InvalidSubmission("tests.module", "candidates here cannot import pytest (verifier.libraries)")
        self._is_there = True
