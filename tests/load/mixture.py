"""Submissions for every verdict that a candidate can get, each with its expected verdict.

Every program is unique: its number is in its code and in its output, so that no answer can belong to another one. The
same seed gives the same submissions. Limits are far above the needs of a right program and far below those of a wrong
one, so that the expected verdict does not depend on the load of the machine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

_PATIENT = {"wall_time_s": 60, "cpu_time_s": 30, "memory_bytes": 1 << 30}
_HOARD = "k = []\nwhile chosen: k.append(bytes(1 << 22))"
_ADD = "a, b = map(int, input().split())\n"
_CHECKER = (
    "import sys\n"
    "given, said = open(sys.argv[1]).read().split(), open(sys.argv[2]).read().split()\n"
    "sys.exit(0 if said == [str(sum(map(int, given)))] else 1)\n"
)
_INTERACTOR = (
    "import sys\n"
    "secret = int(open(sys.argv[1]).read())\n"
    "print(secret, flush=True)\n"
    "sys.exit(0 if input() == str(secret + 1) else 1)\n"
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One submission: `body` is the request as sent, `truth` the expected verdict."""

    number: int
    truth: str
    body: bytes


@dataclass(frozen=True, slots=True)
class _Draft:
    """The input of a maker of programs: the number, and tests of which one (`at`) is chosen to fail."""

    number: int
    pairs: tuple[tuple[int, int], ...]
    at: int

    def stdin(self) -> dict[str, Any]:
        """The program must print the sum of the pair and the number."""
        cases = [{"input": f"{a} {b}\n", "output": f"{a + b + self.number}\n"} for a, b in self.pairs]
        return {"type": "stdin", "cases": cases}

    def call(self) -> dict[str, Any]:
        """The same tests for a function."""
        cases = [{"args": [a, b], "expected": a + b + self.number} for a, b in self.pairs]
        return {"type": "call", "entry_point": "total", "cases": cases}

    def program(self, middle: str) -> dict[str, Any]:
        """A right program except for `middle`, which runs after the input was read and may use `chosen`."""
        chosen = self.pairs[self.at]
        code = f"{_ADD}chosen = (a, b) == {chosen}\n{middle}\nprint(a + b + {self.number})\n"
        return {"code": code, "tests": self.stdin()}

    def function(self, middle: str) -> dict[str, Any]:
        """Like `program`, as a function."""
        chosen = self.pairs[self.at]
        body = f"    chosen = (a, b) == {chosen}\n    {middle}\n    return a + b + {self.number}\n"
        return {"code": f"def total(a, b):\n{body}", "tests": self.call()}


def _all_tests(draft: _Draft) -> dict[str, Any]:
    return draft.program("if chosen: b += 1") | {"stop_on_first_failure": False}


def _in_words(draft: _Draft) -> dict[str, Any]:
    made = draft.program("")
    return {"completion": f"Add them up.\n```python\n{made['code']}```\n", "tests": made["tests"]}


def _nothing(draft: _Draft) -> dict[str, Any]:
    return {"completion": f"I cannot do number {draft.number}.", "tests": draft.stdin()}


def _limited(middle: str, **limits: float) -> Callable[[_Draft], dict[str, Any]]:
    return lambda draft: draft.program(middle) | {"limits": _PATIENT | limits}


def _program(middle: str) -> Callable[[_Draft], dict[str, Any]]:
    return lambda draft: draft.program(middle)


def _function(middle: str) -> Callable[[_Draft], dict[str, Any]]:
    return lambda draft: draft.function(middle)


def _asserted(draft: _Draft) -> dict[str, Any]:
    cases = [f"assert total({a}, {b}) == {a + b + draft.number}" for a, b in draft.pairs[:3]]
    return {"code": draft.function("pass")["code"], "tests": {"type": "assert", "cases": cases}}


def _checked(draft: _Draft) -> dict[str, Any]:
    cases = [{"input": f"{a} {b} {draft.number}"} for a, b in draft.pairs[:3]]
    checker = {"language": "python", "code": _CHECKER}
    code = f"print(sum(map(int, input().split())))  # {draft.number}\n"
    return {"code": code, "tests": {"type": "checker", "cases": cases, "checker": checker}}


def _talking(draft: _Draft) -> dict[str, Any]:
    interactor = {"language": "python", "code": _INTERACTOR}
    tests = {"type": "interactive", "cases": [{"input": str(draft.number)}], "interactor": interactor}
    return {"code": f"print(int(input()) + 1)  # {draft.number}\n", "tests": tests}


def _c(draft: _Draft) -> dict[str, Any]:
    code = f'#include <stdio.h>\nint main(){{long a,b;scanf("%ld %ld",&a,&b);printf("%ld",a+b+{draft.number});}}\n'
    return {"language": "c", "code": code, "tests": draft.stdin()}


def _bad_c(draft: _Draft) -> dict[str, Any]:
    return {"language": "c", "code": f"int main() {{ return {draft.number} +; }}\n", "tests": draft.stdin()}


def _javascript(draft: _Draft) -> dict[str, Any]:
    read = "const [a, b] = require('fs').readFileSync(0, 'utf8').split(' ').map(Number);"
    code = f"{read}\nconsole.log(a - b + {draft.number});\n"
    return {"language": "javascript", "code": code, "tests": draft.stdin()}


# (percentage, required language, expected verdict, maker)
_KINDS: tuple[tuple[int, str, str, Callable[[_Draft], dict[str, Any]]], ...] = (
    (24, "python", "accepted", _program("")),
    (6, "python", "accepted", _in_words),
    (8, "python", "accepted", _function("pass")),
    (2, "python", "accepted", _asserted),
    (2, "python", "accepted", _checked),
    (1, "python", "accepted", _talking),
    (1, "c", "accepted", _c),
    (10, "python", "wrong_answer", _program("if chosen: b += 1")),
    (6, "python", "wrong_answer", _all_tests),
    (5, "python", "wrong_answer", _function("b += chosen")),
    (1, "javascript", "wrong_answer", _javascript),
    (5, "python", "runtime_error", _program("if chosen: raise SystemExit(3)")),
    (3, "python", "runtime_error", _program("if chosen: a = a // 0")),
    (2, "python", "runtime_error", _program("if chosen: import os; os.kill(os.getpid(), 11)")),
    (3, "python", "runtime_error", _function("1 // (not chosen)")),
    (6, "python", "compile_error", _program("if chosen: b += (")),
    (1, "c", "compile_error", _bad_c),
    (4, "python", "no_code", _nothing),
    (3, "python", "time_limit_exceeded", _limited("while chosen: pass", cpu_time_s=0.2)),
    (1, "python", "time_limit_exceeded", _limited("import time; time.sleep(chosen * 20)", wall_time_s=0.4)),
    (3, "python", "memory_limit_exceeded", _limited(_HOARD, memory_bytes=1 << 27)),
    (3, "python", "output_limit_exceeded", _limited("while chosen: print('x' * 1000)", output_bytes=1 << 16)),
)  # fmt: skip


def mixture(num_samples: int, languages: Collection[str], seed: int = 0) -> list[Sample]:
    """`num_samples` different submissions in random order, with every kind of the given languages in its proportion."""
    draw = random.Random(seed)
    kinds = [kind for kind in _KINDS if kind[1] in languages]
    deck: list[tuple[str, Callable[[_Draft], dict[str, Any]]]] = []
    while len(deck) < num_samples:
        hundred = [(truth, make) for weight, _, truth, make in kinds for _ in range(weight)]
        draw.shuffle(hundred)
        deck += hundred
    return [_sample(number, truth, make, draw) for number, (truth, make) in enumerate(deck[:num_samples], 1)]


def _sample(number: int, truth: str, make: Callable[[_Draft], dict[str, Any]], draw: random.Random) -> Sample:
    pairs = [(draw.randrange(10**6), 10 * index + 1) for index in range(draw.randint(2, 8))]
    record = make(_Draft(number, tuple(pairs), draw.randrange(len(pairs))))
    return Sample(number, truth, json.dumps({"limits": _PATIENT} | record).encode())
