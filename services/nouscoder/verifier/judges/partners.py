"""Turns the exit code of a checker or an interactor into a ruling on the test. Pure.

testlib's codes: 0 right, 1 wrong, 2 and 8 malformed output, 4 text after the answer, 7 partly right (points). A test
passes or fails, so partly right is wrong_answer, with the points in the remark. Code 3, and any other end of the judge
program, means that the judge or its answer file is at fault. That gives internal_error, never a candidate's failure.

A candidate can make a correct judge program exceed a limit: by an output of many times the expected size, or by leaving
an interactor that waits for more. Then the candidate fails. Without this rule a candidate could turn each wrong answer
into an internal_error.
"""

from __future__ import annotations

from dataclasses import dataclass

from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.judges.base import readable
from nouscoder.verifier.sandbox.base import Exit, RunResult

_RIGHT = 0
_WRONG = frozenset({1, 2, 4, 7, 8})
_SIGPIPE = 13
_LIMITS = (Exit.TIME_LIMIT, Exit.MEMORY_LIMIT, Exit.OUTPUT_LIMIT)
# Errors of programs that read or write after their partner has ended.
_PARTNER_ENDED = (b"BrokenPipeError", b"Broken pipe", b"EOFError", b"NoSuchElementException")
_REMARK_CHARS = 500
_LARGE_BYTES, _MANY_TIMES = 1_000_000, 8  # the judge is not expected to read a larger output than this


@dataclass(frozen=True, slots=True)
class Ruling:
    """The decision of a checker, an interactor or the math library on a test, with a remark."""

    outcome: VerdictKind
    remark: str = ""


def ruling_of_checker(check: RunResult, output_bytes: int = 0, expected_bytes: int = 0) -> Ruling:
    """The ruling on a test whose program exited normally, after an output of `output_bytes`.

    `expected_bytes` is the size of the files that the judge knows.
    """
    if check.exit is Exit.EXITED and check.exit_code == _RIGHT:
        return Ruling(VerdictKind.ACCEPTED, _remark(check))
    if check.exit is Exit.EXITED and check.exit_code in _WRONG:
        return Ruling(VerdictKind.WRONG_ANSWER, _remark(check))
    if output_bytes > _LARGE_BYTES + _MANY_TIMES * expected_bytes:
        return Ruling(VerdictKind.WRONG_ANSWER, f"the output is so large that the checker {_end_of(check)}")
    return _at_fault("checker", check)


def ruling_of_interactor(candidate: RunResult, interactor: RunResult) -> Ruling | None:
    """The ruling on a conversation. None when the candidate's own result decides (a limit or an error).

    If both failed, the candidate's error counts, unless it is an error that follows from the end of its partner.
    """
    if candidate.exit in _LIMITS:
        return None
    if interactor.exit in _LIMITS or interactor.signal == _SIGPIPE:
        if candidate.exit is Exit.SIGNALLED or candidate.exit_code != 0:
            return None
        return Ruling(VerdictKind.WRONG_ANSWER, f"the program ended, and the interactor {_end_of(interactor)}")
    if interactor.exit is not Exit.EXITED or interactor.exit_code not in _WRONG | {_RIGHT}:
        return _at_fault("interactor", interactor)
    failed = candidate.exit is Exit.SIGNALLED or candidate.exit_code != 0
    if interactor.exit_code == _RIGHT:
        return None if failed else Ruling(VerdictKind.ACCEPTED, _remark(interactor))
    if failed and candidate.signal != _SIGPIPE and not any(sign in candidate.stderr[-1000:] for sign in _PARTNER_ENDED):
        return None
    return Ruling(VerdictKind.WRONG_ANSWER, _remark(interactor))


def _at_fault(name: str, judge: RunResult) -> Ruling:
    remark = _remark(judge)
    return Ruling(VerdictKind.INTERNAL_ERROR, f"the {name} {_end_of(judge)}" + (f": {remark}" if remark else ""))


def _remark(judge: RunResult) -> str:
    """The remark of a judge program: its stderr, as with testlib, or its stdout."""
    return readable(judge.stderr[:_REMARK_CHARS]).strip() or readable(judge.stdout[:_REMARK_CHARS]).strip()


def _end_of(judge: RunResult) -> str:
    match judge.exit:
        case Exit.EXITED:
            return f"failed with exit code {judge.exit_code}"
        case Exit.SIGNALLED:
            return f"was killed by signal {judge.signal}"
        case other:
            return f"exceeded its {other.value.replace('_', ' ')}"
