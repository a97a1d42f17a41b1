"""Setups and files for pytest are tried once without a program. A fault that they have then is no program's.

A program cannot take part in a trial, so it can neither make a fault nor hide one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from nouscoder.domain.submission import AssertTests, CallTests, Prelude, Submission
from nouscoder.verifier import judges
from nouscoder.verifier.grading.proofs import PROOF_S, Proofs
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.judges.asserting import START_BYTES, START_S
from nouscoder.verifier.judges.judge import encoded, readable, with_setup
from nouscoder.verifier.judges.lcb import PRELUDE
from nouscoder.verifier.sandbox.base import CompileFailed, Exit, Program, Sandbox
from nouscoder.verifier.toolchains.languages import installed

_END, _NO_ARGUMENTS = "nouscoder_end", b'{"args": [], "kwargs": {}}'
_ENDS = f"def {_END}(): pass"  # the program of a setup that is tried alone
_TRIAL = "__nouscoder_trial__"


class ProvenSetups:
    """Whether setups of call and assert tests in Python work without a program in the sandboxes of one grader."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._proofs = Proofs()

    async def require(self, submission: Submission) -> None:
        """Raises InvalidSubmission for a setup or a file for pytest with a fault of its own, and SandboxError."""
        tests = submission.tests
        if not isinstance(tests, CallTests | AssertTests) or not tests.setup or submission.language != "python":
            return
        if isinstance(tests, AssertTests) and tests.module:
            arguments = encoded(json.dumps({"args": [tests.module, [*tests.cases], tests.setup], "kwargs": {}}))
            program = _program(submission, _trial(), _TRIAL, "")
            prove = partial(self._try_file, program, arguments)
        else:
            arguments = b""
            lines = PRELUDE if submission.profile.is_lcb or submission.prelude is Prelude.LCB else ""
            program = _program(submission, _ENDS, _END, with_setup(lines, tests.setup))
            prove = partial(self._try_setup, program)
        parts = (program.prelude, program.files, program.limits, arguments)
        await self._proofs.require(hashlib.sha256(repr(parts).encode("utf8", "surrogatepass")).digest(), prove)

    async def _try_setup(self, program: Program) -> None:
        try:
            async with self._sandbox.session(program) as session:
                result = await session.run(_NO_ARGUMENTS)
        except CompileFailed as failure:
            raise _broken(failure.detail) from None
        if result.exit in (Exit.TIME_LIMIT, Exit.MEMORY_LIMIT, Exit.OUTPUT_LIMIT):
            raise _broken(f"it exceeds a limit ({result.exit.value})")
        if result.result is None:
            raise _broken(readable(result.stderr[-500:]) if result.exit_code else "it ends the process")

    async def _try_file(self, program: Program, arguments: bytes) -> None:
        limits = program.limits
        longer = replace(limits, cpu_time_s=limits.cpu_time_s + START_S, memory_bytes=limits.memory_bytes + START_BYTES)
        async with self._sandbox.session(replace(program, limits=longer)) as session:
            result = await session.run(arguments)
        if fault := json.loads(result.result or b"null"):
            number, said = fault
            raise InvalidSubmission(f"tests.cases[{number - 1}]" if number else "tests.setup", said)


def _program(submission: Submission, source: str, entry_point: str, prelude: str) -> Program:
    # Other work on the machine takes wall time. CPU time ends a setup that computes without end.
    limits = replace(submission.limits, wall_time_s=submission.limits.wall_time_s + PROOF_S)
    files = {name: encoded(text) for name, text in submission.files.items()}
    return Program(installed()["python"], source, limits, entry_point, prelude, submission.problem_id, files=files)


@cache
def _trial() -> str:
    return Path(judges.__file__).with_name("pytest_trial.py").read_text("utf-8")


def _broken(said: str) -> InvalidSubmission:
    last = said.strip().rpartition("\n")[2] or "it ends the process"
    return InvalidSubmission("tests.setup", f"fails before any program runs: {last}")
