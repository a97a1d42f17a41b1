"""The attack corpus: programs that attack the service, by category in programs/*.toml, with their expected verdicts.

Keys of a program: `code`, or `pieces` ([text, times], joined), or `attempt` (calls of `attempt(f, *args)`, all of which
must be refused; the program then prints "held"); `verdict` (one verdict, or a list of acceptable ones); `stdin`,
`output`, or `entry_point` and `expected` for a call; `wall_s`, `cpu_s`, `memory_mib`, `processes`; `machine` for
programs with system call numbers, `backends` for programs that have a meaning only there, `why` for the reason. The
test fills in @PROJECT@, @PORT@, @ABSTRACT@, @SOCKET@ and @SECRET@.
"""

from __future__ import annotations

import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nouscoder.domain.submission import CallCase, CallTests, Limits, StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import VerdictKind

PROGRAMS = Path(__file__).parent / "programs"
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
_KEYS = {
    "code", "pieces", "attempt", "verdict", "why", "stdin", "stdin_bytes", "output", "entry_point", "expected",
    "wall_s", "cpu_s", "memory_mib", "processes", "machine", "backends",
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
        table = self.table
        if "entry_point" in table:
            case = CallCase((), {}, _fill(table.get("expected", 42), secret))
            tests: StdinTests | CallTests = CallTests(table["entry_point"], (case, case))
        else:
            given = _fill(table.get("stdin", "41\n"), secret) + "x" * table.get("stdin_bytes", 0)
            wanted = _fill(table.get("output", "held" if "attempt" in table else "42"), secret)
            tests = StdinTests((StdinCase(given, wanted), StdinCase(given, wanted)))
        return Submission(tests, self.code, limits=self._limits(patience), stop_on_first_failure=False)

    def _limits(self, patience: float) -> Limits:
        table = self.table
        only_time = self.verdicts == {VerdictKind.TIME_LIMIT_EXCEEDED}
        late = VerdictKind.TIME_LIMIT_EXCEEDED in self.verdicts
        factor = 1.0 if only_time else patience if late else max(patience, 12.0)
        wall_s = table.get("wall_s", _QUICK_S if only_time else 5.0) * factor
        memory = table.get("memory_mib", 256) << 20
        return Limits(wall_s, table.get("cpu_s", 5.0) * factor, memory, 1 << 20, table.get("processes", 20))


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
            assert len({"code", "pieces", "attempt"} & set(table)) == 1, label
            code = table.get("code") or "".join(text * times for text, times in table.get("pieces", ()))
            verdicts = frozenset(VerdictKind(kind) for kind in table.get("verdict", ("accepted",)))
            if "attempt" in table:
                code = _TRY + table["attempt"] + _SAY
            attacks[label] = Attack(label, code, verdicts, table)
    return attacks


@pytest.fixture(scope="session")
def attacks() -> dict[str, Attack]:
    """The corpus."""
    return load_attacks()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test with a parameter `attack` for every program."""
    if "attack" in metafunc.fixturenames:
        corpus = load_attacks()
        metafunc.parametrize("attack", corpus.values(), ids=corpus.keys())
