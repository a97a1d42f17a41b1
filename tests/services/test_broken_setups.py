"""A setup that fails before the program runs is at fault, and the program is not judged.

A program cannot pretend it: the setup is tried in a sandbox of its own, without a program.
"""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from nouscoder.config import VerifierSection
from nouscoder.domain.submission import AssertTests, CallCase, CallTests, Limits, Profile, Submission
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.grading.grader import Grader, local_grader
from nouscoder.verifier.grading.validation import InvalidSubmission

RIGHT = "def f(x):\n    return x"
LIMITS = Limits(wall_time_s=1, cpu_time_s=1, memory_bytes=256 * 1024**2)
# A setup, and what is said of it.
BROKEN = {
    "an exception": ("1 / 0", "ZeroDivisionError: division by zero"),
    "a missing module": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "an unknown name": ("x = undefined", "NameError: name 'undefined' is not defined"),
    "a name of the program": ("y = f(1)", "NameError: name 'f' is not defined"),
    "an early end": ("import sys\nsys.exit(0)", "it ends the process"),
    "an end without cleaning": ("import os\nos._exit(0)", "it ends the process"),
    "a signal": ("import os\nos.kill(os.getpid(), 9)", "it ends the process"),
    "no end": ("while True: pass", "time_limit"),
    "too much memory": ("a = bytearray(8 << 30)", "memory_limit"),
}
SOUND = {
    "a text that is no Python": "exec('y = 1')\nmessage = 'hello, world!'",
    "a NUL in a text": "exec('y = 1')\nmessage = 'a\\0b'",
    "a future": "from __future__ import annotations\nmessage = 'hello, world!'",
    "output": "print('out')\nimport sys\nprint('err', file=sys.stderr)",
    "a guard": "if __name__ == '__main__':\n    raise SystemExit",
    "threads that end": "import threading\nt = threading.Thread(target=int)\nt.start()\nt.join()",
}


def submissions(setup: str, code: str = RIGHT) -> list[Submission]:
    """The same tests in each form that has a setup before the program."""
    call = CallTests(entry_point="f", cases=(CallCase(args=(1,), expected=1),), setup=setup)
    asserts = AssertTests(cases=("assert f(1) == 1",), setup=setup)
    return [
        Submission(code=code, tests=asserts, limits=LIMITS),
        Submission(code=code, tests=call, limits=LIMITS),
        Submission(code=code, tests=call, limits=LIMITS, profile=Profile.LCB),
    ]


@pytest.mark.parametrize("name", BROKEN)
async def test_a_setup_that_fails_without_a_program_is_refused(name: str) -> None:
    setup, said = BROKEN[name]
    async with local_grader(VerifierSection()) as grader:
        for submission in submissions(setup):
            with pytest.raises(InvalidSubmission, match="fails before any program runs") as refused:
                await grader.grade(submission)
            assert refused.value.field == "tests.setup"
            assert said in str(refused.value)


@pytest.mark.parametrize("name", SOUND)
async def test_a_sound_setup_is_tried_once_and_right_programs_are_accepted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_grader(VerifierSection()) as grader:
        for submission in submissions(SOUND[name]):
            assert [await kind(grader, submission) for _ in range(2)] == [VerdictKind.ACCEPTED] * 2
            session = Mock(wraps=grader._sandbox.session)
            monkeypatch.setattr(grader._sandbox, "session", session)
            assert await kind(grader, submission) is VerdictKind.ACCEPTED
            assert session.call_count == 1
            monkeypatch.undo()


async def test_a_program_cannot_make_the_setups_fault() -> None:
    async with local_grader(VerifierSection()) as grader:
        for code in ("import os\nos._exit(0)", "1 / 0", "while True: pass", "print(", "import sys\nsys.exit(3)"):
            for submission in submissions("x = 1", code):
                assert await kind(grader, submission) not in (VerdictKind.ACCEPTED, VerdictKind.INTERNAL_ERROR)


async def kind(grader: Grader, submission: Submission) -> VerdictKind:
    return (await grader.grade(submission)).kind
