"""The attack corpus: programs that attack the service, with their expected verdicts, in attacks/programs/*.toml.

Keys of a program: `code`, or `pieces` ([text, times], joined), or `attempt` (calls of `attempt(f, *args)`, all of which
must be refused; the program then prints "held"), or `call` (the number of a system call of x86_64 and its arguments; it
must be refused with EPERM or ENOSYS, so that a call that is allowed and fails for its arguments is noticed); `language`
and `files`; `verdict` (one verdict, or a list of acceptable ones); `stdin`, `output`, or `entry_point` and `expected`
for a call, or `checker` or `interactor` (language and code), or `asserts`; `profile`; `wall_s`, `cpu_s`, `memory_mib`,
`output_mib`, `processes`; `machine` for programs with system call numbers, `backends` for programs that have a meaning
only there, `root` for those that need a service that is root, `slow` for those that are not in `make test` (with
"corpus" only in `make test-corpus`), `why` for the reason. The test fills in @PROJECT@, @PORT@, @ABSTRACT@, @SOCKET@,
@HOST@ and @SECRET@.
"""

from __future__ import annotations

import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nouscoder.domain.submission import (
    AssertTests,
    CallCase,
    CallTests,
    CheckerTests,
    InteractiveTests,
    JudgeProgram,
    Limits,
    Profile,
    StdinCase,
    StdinTests,
    Submission,
    Tests,
)
from nouscoder.domain.verdict import VerdictKind

PROGRAMS = Path(__file__).parent / "attacks" / "programs"
_TRY = """
escaped, tried = [], 0
def attempt(f, *a):
    global tried
    tried += 1
    try: f(*a)
    except (OSError, ValueError): return
    escaped.append((f, a))
"""
_SAY = "\nprint('held' if tried and not escaped else ('escaped', escaped))\n"
_CALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
answer = libc.syscall(*{arguments!r})
print("held" if answer == -1 and ctypes.get_errno() in (1, 38) else ("escaped", answer, ctypes.get_errno()))
"""
_SOURCES = {"code", "pieces", "attempt", "call"}
_KEYS = _SOURCES | {
    "verdict", "why", "stdin", "stdin_bytes", "output", "entry_point", "expected", "checker", "interactor", "asserts",
    "profile", "language", "files", "wall_s", "cpu_s", "memory_mib", "output_mib", "processes", "machine", "backends",
    "root", "slow",
}  # fmt: skip
_QUICK_S = 0.5  # the wall limit of programs that only the limit ends


@dataclass(frozen=True, slots=True)
class Attack:
    """One program of the corpus."""

    name: str
    code: str
    verdicts: frozenset[VerdictKind]
    table: Mapping[str, Any]

    def submission(self, filled: Mapping[str, str], patience: float = 1.0) -> Submission:
        """The program with two equal tests, so that it runs in the process that compiled and in one forked later.

        On a busy machine, `patience` multiplies the time limits of programs that can also end in another way. Programs
        that no time limit may end have twelve times the limits in any case.
        """
        secret = {"@SECRET@": secrets.token_hex(16), **filled}
        return Submission(
            self._tests(secret),
            self.code,
            language=self.language,
            limits=self._limits(patience),
            stop_on_first_failure=False,
            profile=Profile(self.table.get("profile", "process")),
            files=dict(self.table.get("files", {})),
        )

    @property
    def language(self) -> str:
        """The language of the program."""
        return str(self.table.get("language", "python"))

    def _tests(self, secret: Mapping[str, str]) -> Tests:
        table = self.table
        if "entry_point" in table:
            call = CallCase((), {}, _fill(table.get("expected", 42), secret))
            return CallTests(table["entry_point"], (call, call))
        if "asserts" in table:
            return AssertTests((table["asserts"], table["asserts"]))
        given = _fill(table.get("stdin", "41\n"), secret) + "x" * table.get("stdin_bytes", 0)
        wanted = _fill(table.get("output", "held" if {"attempt", "call"} & set(table) else "42"), secret)
        cases = (StdinCase(given, wanted), StdinCase(given, wanted))
        if "checker" in table:
            return CheckerTests(cases, JudgeProgram(**table["checker"]))
        return (
            InteractiveTests(cases, JudgeProgram(**table["interactor"])) if "interactor" in table else StdinTests(cases)
        )

    def _limits(self, patience: float) -> Limits:
        table = self.table
        only_time = self.verdicts == {VerdictKind.TIME_LIMIT_EXCEEDED}
        late = VerdictKind.TIME_LIMIT_EXCEEDED in self.verdicts
        factor = 1.0 if only_time else patience if late else max(patience, 12.0)
        wall_s = table.get("wall_s", _QUICK_S if only_time else 5.0) * factor
        memory = table.get("memory_mib", 256) << 20
        output = table.get("output_mib", 1) << 20
        return Limits(wall_s, table.get("cpu_s", 5.0) * factor, memory, output, table.get("processes", 20))


def _fill(value: Any, filled: Mapping[str, str]) -> Any:
    if not isinstance(value, str):
        return value
    for mark, text in filled.items():
        value = value.replace(mark, text)
    return value


def load_attacks() -> dict[str, Attack]:
    """The whole corpus, by "category/name". Raises AssertionError naming a table of another form."""
    attacks = {}
    for file in sorted(PROGRAMS.glob("*.toml")):
        for name, table in tomllib.loads(file.read_text(encoding="utf8")).items():
            label = f"{file.stem}/{name}"
            assert not set(table) - _KEYS, f"{label}: {set(table) - _KEYS}"
            assert len(_SOURCES & set(table)) == 1, label
            verdicts = frozenset(VerdictKind(kind) for kind in table.get("verdict", ("accepted",)))
            if "call" in table:
                table = {**table, "machine": "x86_64"}
            attacks[label] = Attack(label, _code(table), verdicts, table)
    return attacks


def _code(table: Mapping[str, Any]) -> str:
    if "attempt" in table:
        return _TRY + str(table["attempt"]) + _SAY
    if "call" in table:
        arguments = tuple(one.encode() if isinstance(one, str) else one for one in table["call"])
        return _CALL.format(arguments=arguments)
    return str(table.get("code") or "".join(text * times for text, times in table["pieces"]))
