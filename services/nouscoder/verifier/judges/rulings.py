"""Turns the exit code of a checker or an interactor into a ruling on the test. Pure.

testlib's codes: 0 right, 1 wrong, 2 and 8 malformed output, 4 text after the answer, 7 partly right (points). Partly
right is wrong_answer with points from 0 to 1: the number with which the judge's output begins, or the fraction of its
first line, `partial 3/10` (DMOJ's module coci). Later lines may be the candidate's, shown by the judge. 1 is right.
Code 3 means that the judge's answer is wrong: internal_error, never a candidate's failure. A judge of Kattis's protocol
says 42 (right) or 43 (wrong).

Any other end is a crash of the judge program (`has_crashed`), also an uncaught exception, whose exit code is 1 in most
languages and 2 in Go. A candidate can cause a crash: by an output that a correct checker cannot read, or that is so
large that it exceeds a limit. So after a crash the checker runs on the answer file in place of the output. If it
crashes again, the checker is at fault (internal_error); otherwise the output is wrong. Without this rule a candidate
could turn each wrong answer into an internal_error. An interactor that exceeds a limit after the candidate has left it
is no fault either, nor one that crashes after it has read something that the candidate said, or the end of its input.
One that ends otherwise than by a decision before that is at fault, because nothing of the candidate reached it. So is
one that sleeps until its time limit. When both fail, the one that ended first decides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from nouscoder.domain.submission import JudgeProtocol
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.judges.judge import readable
from nouscoder.verifier.sandbox.base import Exit, RunResult

_RIGHT, _FAIL, _POINTS = 0, 3, 7
_WRONG = frozenset({1, 2, 4, 7, 8})
_KATTIS_CODES = {42: _RIGHT, 43: 1}
_CRASHED = 256  # no process has this exit code
# What a runtime writes when a program ends by its own exception, or never begins, with the exit code of a decision:
# Python, JVM, Node, Go, Rust, Ruby, Lua, R, Perl, bash.
_UNCAUGHT = re.compile(
    rb"""^(?:Traceback \(most recent call last\):|Exception in thread "|\w+Error: |Node\.js v\d|goroutine \d+ \["""
    rb"""|Error: (?:"|\w+ ?[({]|Could not |Main method |LinkageError )|Error occurred during initialization of VM"""
    rb"""|stack traceback:|Execution halted)|\(\w+Error\)$| at \S+ line \d+\.$|: line \d+: syntax error""",
    re.MULTILINE,
)
_NUMBER = re.compile(rb"^\s*(?:points:?\s+)?([0-9.]+(?:[eE][+-]?[0-9]+)?)(?:\s|$)")
_FRACTION = re.compile(rb"\s*partial ([0-9]{1,15})/([0-9]{0,14}[1-9][0-9]{0,14})\r?$", re.MULTILINE)
_LIMITS = (Exit.TIME_LIMIT, Exit.MEMORY_LIMIT, Exit.OUTPUT_LIMIT)
_REMARK_CHARS = 500
_STDERR_BYTES = 64 * 1024  # the end of a longer one, which may begin with what the candidate said, is all that is known
_ASLEEP = 0.05  # the CPU time for each second: a program that computes gets more, on a busy machine too


ACCEPTS = RunResult(Exit.EXITED, _RIGHT, 0, 0.0, 0.0, 0, b"", b"")  # how a checker ends that accepts


@dataclass(frozen=True, slots=True)
class Ruling:
    """The decision of a checker, an interactor or the math library on a test, with a remark.

    `points` is the share of a test that is partly right, from 0 to below 1.
    """

    outcome: VerdictKind
    remark: str = ""
    points: float | None = None


def by_testlib(judge: RunResult, protocol: JudgeProtocol) -> RunResult:
    """The end of a judge program of any protocol with testlib's exit codes."""
    if protocol is JudgeProtocol.TESTLIB or judge.exit is not Exit.EXITED:
        return judge
    return replace(judge, exit_code=_KATTIS_CODES.get(judge.exit_code, _CRASHED))


def has_crashed(check: RunResult) -> bool:
    """Whether a checker or an interactor ended otherwise than by a decision."""
    if check.exit is not Exit.EXITED or check.exit_code not in _WRONG | {_RIGHT, _FAIL}:
        return True
    if _has_too_many_points(check):
        return True
    return check.exit_code in _WRONG and _UNCAUGHT.search(check.stderr) is not None


def ruling_of_checker(check: RunResult) -> Ruling:
    """The ruling of a checker that has not crashed, on a test whose program exited normally."""
    if check.exit_code == _FAIL:
        return _with_remark(VerdictKind.INTERNAL_ERROR, "checker", check)
    return Ruling(VerdictKind.ACCEPTED, _remark(check)) if check.exit_code == _RIGHT else _wrong(check)


def ruling_of_crash(check: RunResult, on_answer: RunResult, has_answer: bool) -> Ruling:
    """The ruling of a checker that crashed on an output. `on_answer` is its run on the answer file.

    Without an answer, an exit code that is also that of a decision (an uncaught exception is 1, like wrong) counts as
    the decision.
    """
    says_wrong = check.exit is Exit.EXITED and check.exit_code in _WRONG and not has_answer
    if has_crashed(on_answer) and not says_wrong:
        return _with_remark(VerdictKind.INTERNAL_ERROR, "checker", check)
    remark = _remark(check)
    return Ruling(VerdictKind.WRONG_ANSWER, f"the checker {_end_of(check)} on this output" + (remark and f": {remark}"))


def _wrong(judge: RunResult) -> Ruling:
    points = _points(judge) if judge.exit_code == _POINTS else None
    if points == 1:
        return Ruling(VerdictKind.ACCEPTED, _remark(judge))
    return Ruling(VerdictKind.WRONG_ANSWER, _remark(judge), points)


def _has_too_many_points(judge: RunResult) -> bool:
    return judge.exit_code == _POINTS and (_points(judge) or 0) > 1


def _points(judge: RunResult) -> float | None:
    """The number with which the judge's output begins (testlib: "points 0.5 ..."), else the fraction of its first line
    (DMOJ: "partial 3/10"); None when there is neither.
    """
    for text in (judge.stderr if len(judge.stderr) < _STDERR_BYTES else b"", judge.stdout):
        if found := _NUMBER.match(text[:_REMARK_CHARS]):
            try:
                return float(found[1])
            except ValueError:
                return None
        if found := _FRACTION.match(text):
            return int(found[1]) / int(found[2])
    return None


def ruling_of_interactor(candidate: RunResult, interactor: RunResult) -> Ruling | None:
    """The ruling on a dialogue. None when the candidate's own result decides (a limit or an error).

    An interactor that found the candidate wrong before the candidate failed or exceeded a limit has decided (as with
    Kattis), because the candidate's failure may follow from the end of its partner.
    """
    slept = interactor.exit is Exit.TIME_LIMIT and interactor.cpu_time_s < _ASLEEP * interactor.wall_time_s
    failed = candidate.exit is not Exit.EXITED or candidate.exit_code != 0
    unheard = has_crashed(interactor) and not interactor.has_heard
    if slept or (unheard and (candidate.partner_ended or not failed)):
        return _with_remark(VerdictKind.INTERNAL_ERROR, "interactor", interactor)
    if candidate.exit in _LIMITS:
        has_decided = candidate.partner_ended and interactor.exit is Exit.EXITED and interactor.exit_code in _WRONG
        decision = _wrong(interactor) if has_decided else None
        return None if decision is None or decision.outcome is VerdictKind.ACCEPTED else decision
    if interactor.exit_code == _FAIL or _has_too_many_points(interactor):
        return _with_remark(VerdictKind.INTERNAL_ERROR, "interactor", interactor)
    if not candidate.partner_ended and failed:
        return None
    if has_crashed(interactor):
        return _with_remark(VerdictKind.WRONG_ANSWER, "interactor", interactor)
    if interactor.exit_code == _RIGHT:
        return None if failed else Ruling(VerdictKind.ACCEPTED, _remark(interactor))
    ruling = _wrong(interactor)
    return None if failed and ruling.outcome is VerdictKind.ACCEPTED else ruling


def _with_remark(outcome: VerdictKind, name: str, judge: RunResult) -> Ruling:
    remark = _remark(judge)
    return Ruling(outcome, f"the {name} {_end_of(judge)}" + (f": {remark}" if remark else ""))


def _remark(judge: RunResult) -> str:
    """The remark of a judge program: its stderr, as with testlib, or its stdout."""
    return readable(judge.stderr[:_REMARK_CHARS]).strip() or readable(judge.stdout[:_REMARK_CHARS]).strip()


def _end_of(judge: RunResult) -> str:
    match judge.exit:
        case Exit.EXITED if judge.exit_code == _CRASHED:
            return "exited with neither 42 nor 43"
        case Exit.EXITED if judge.exit_code == _POINTS:
            return "gave points that are not from 0 to 1"
        case Exit.EXITED:
            return f"failed with exit code {judge.exit_code}"
        case Exit.SIGNALLED:
            return f"was killed by signal {judge.signal}"
        case other:
            return f"exceeded its {other.value.replace('_', ' ')}"
