"""Checkers, limits and programs of the sets whose outputs a checker judges.

All checkers get the protocol of testlib: the arguments are `input output answer`, and exit code 0 is right.
"""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

from nouscoder.data.importers.fields import MAX_REFERENCES, Reason, Rejected, decoded, stdin_tests
from nouscoder.data.problems import Reference
from nouscoder.domain.submission import LANGUAGES, CheckerTests, JudgeProgram, Limits, StdinTests, language_name

_TESTLIB = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"][^<">\n]*testlib\.h[">].*$', re.MULTILINE)


@cache
def header(name: str) -> str:
    """The text of a file beside this module."""
    return Path(__file__).with_name(name).read_text(encoding="utf8")


def cpp_checker(source: str, before: str = "") -> JudgeProgram:
    """A checker in C++. What it needs of testlib.h takes the place of the first include."""
    found = _TESTLIB.search(source)
    if found is None:
        return JudgeProgram(before + source, "cpp")
    rest = _TESTLIB.sub("", source[found.end() :])
    return JudgeProgram(source[: found.start()] + header("testlib_subset.h") + before + rest, "cpp")


def judged(tests: StdinTests, checker: JudgeProgram | None) -> StdinTests | CheckerTests:
    """The tests, judged by the checker if there is one."""
    return tests if checker is None else CheckerTests(tests.cases, checker)


MOST_SECONDS, _MOST_MIB = 3600.0, 1024.0**2


def limits_of(cpu_time_s: Any, memory_mib: Any) -> Limits:
    """A time limit counts CPU time; the wall time may be twice as long. Without a value they are the usual ones."""
    usual = Limits()
    seconds, mebibytes = (
        positive(cpu_time_s, "time limit", MOST_SECONDS),
        positive(memory_mib, "memory limit", _MOST_MIB),
    )
    memory_bytes = int(mebibytes * 1024**2) if mebibytes else usual.memory_bytes
    if not seconds:
        return Limits(memory_bytes=memory_bytes)
    return Limits(2 * seconds + 1, seconds, memory_bytes)


def positive(value: Any, name: str, most: float) -> float:
    """A positive number; 0 for none. Raises Rejected."""
    try:
        found = float(value or 0)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not 0 <= found <= most:
        raise Rejected(Reason.MALFORMED, f"the {name} {value!r:.40} is no number up to {most:.0f}")
    return found


def cases_of(value: Any, given: str = "input", wanted: str = "output") -> StdinTests:
    """Tests from a list of records with these two fields. Raises Rejected."""
    cases = decoded(value or [])
    if not isinstance(cases, list) or not cases:
        raise Rejected(Reason.NO_TESTS, "there is no test case")
    return stdin_tests((case[given], case[wanted]) for case in cases)


def programs(submissions: Any) -> tuple[Reference, ...]:
    """References from a list of {code, language}, those in Python first. Languages without a grader are left out."""
    known = [
        Reference(one["code"], language)
        for one in submissions or ()
        if one.get("code") and (language := language_name(str(one.get("language") or ""))) in LANGUAGES
    ]
    return tuple(sorted(known, key=lambda one: one.language != "python")[:MAX_REFERENCES])
