"""What the exit code of a checker or an interactor means for the test. Pure.

testlib's codes: 0 right, 1 wrong, 2 and 8 badly formed output, 4 text after the answer, 7 partly right (points). A
test is passed or not, so partly right is wrong_answer, with the points in the remark. 3 says that the judge or its
answer file is at fault; so does any other end of it. That is never the candidate's failure: internal_error.
"""

from __future__ import annotations

from dataclasses import dataclass

from nouscoder.verdict import VerdictKind
from nouscoder.verifier.judges.base import readable
from nouscoder.verifier.sandbox.base import Exit, RunResult

_RIGHT = 0
_WRONG = frozenset({1, 2, 4, 7, 8})
_SIGPIPE = 13
_REMARK_CHARS = 500


@dataclass(frozen=True, slots=True)
class Ruling:
    """What somebody else than the judge of the tests has said of a test, and why."""

    outcome: VerdictKind
    remark: str = ""


def ruling_of_checker(check: RunResult) -> Ruling:
    """The outcome of a test whose program ended well."""
    if check.exit is Exit.EXITED and check.exit_code == _RIGHT:
        return Ruling(VerdictKind.ACCEPTED, _remark(check))
    if check.exit is Exit.EXITED and check.exit_code in _WRONG:
        return Ruling(VerdictKind.WRONG_ANSWER, _remark(check))
    return Ruling(VerdictKind.INTERNAL_ERROR, f"the checker {_end_of(check)}: {_remark(check)}")


def ruling_of_interactor(candidate: RunResult, interactor: RunResult) -> Ruling | None:
    """The outcome of a conversation; None when the candidate's own end says it (a limit, an error of its own).

    A candidate whose partner leaves fails at its next word, and an interactor whose candidate dies reads an early
    end: where both ended badly, whoever ended first is the cause.
    """
    if candidate.exit in (Exit.TIME_LIMIT, Exit.MEMORY_LIMIT, Exit.OUTPUT_LIMIT):
        return None
    if interactor.exit is not Exit.EXITED or interactor.exit_code not in _WRONG | {_RIGHT}:
        return Ruling(VerdictKind.INTERNAL_ERROR, f"the interactor {_end_of(interactor)}: {_remark(interactor)}")
    failed = candidate.exit is Exit.SIGNALLED or candidate.exit_code != 0
    if interactor.exit_code == _RIGHT:
        return None if failed else Ruling(VerdictKind.ACCEPTED, _remark(interactor))
    left_alone = candidate.signal == _SIGPIPE or b"BrokenPipeError" in candidate.stderr[-1000:]
    if failed and not left_alone and candidate.wall_time_s <= interactor.wall_time_s:
        return None
    return Ruling(VerdictKind.WRONG_ANSWER, _remark(interactor))


def _remark(judge: RunResult) -> str:
    """What a judge says of itself: on stderr, as testlib does, or on stdout."""
    return (readable(judge.stderr[:_REMARK_CHARS]).strip() or readable(judge.stdout[:_REMARK_CHARS]).strip()).strip()


def _end_of(judge: RunResult) -> str:
    match judge.exit:
        case Exit.EXITED:
            return f"failed with exit code {judge.exit_code}"
        case Exit.SIGNALLED:
            return f"was killed by signal {judge.signal}"
        case other:
            return f"ran into its {other.value.replace('_', ' ')}"
