"""What a model is asked for a synthetic problem, and what is read from its answer."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from nouscoder.data.importers.fields import Rejected
from nouscoder.data.importers.functions import call_case
from nouscoder.domain.submission import CallCase

_MOST_ASSERTS = 100  # more are not read
_QUESTION = re.compile(r"<question>(.*?)</question>", re.DOTALL)
_TESTS = re.compile(r"<tests>(.*?)</tests>", re.DOTALL)
REQUEST = """Below is a piece of text about programming. Write a new coding question of your own from its idea, and \
tests for it.

The question describes one Python function completely, as a LeetCode question does: its name, its arguments and their \
types, what it returns, and every special case. It must be answerable without the text below, deterministic, and need \
no files, network or third-party libraries. Then write {num_tests} tests. Each is one line of the form \
`assert name(arguments) == value` with literal arguments and a literal value, and they cover ordinary, large and \
special cases.

Answer in exactly this form:
<question>
the question
</question>
<tests>
one assert on each line
</tests>

The text:
{seed}"""
SOLVE = """{prompt}

Think about it, then give the whole program in one ```python block. It defines the function and prints nothing."""


class SeedRejection(StrEnum):
    """Why a seed becomes no problem."""

    NO_QUESTION = "no question"
    FEW_TESTS_WRITTEN = "too few tests written"
    NO_PROGRAM = "no program"
    FEW_TESTS_PASS = "too few tests pass"


class NoProblem(Exception):
    """A seed becomes no problem. The text says why in detail."""

    def __init__(self, reason: SeedRejection, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class WrittenProblem:
    """What a model wrote. `num_written` counts its asserts, also those of other forms."""

    prompt: str
    entry_point: str
    cases: tuple[CallCase, ...]
    num_written: int


def written_problem(answer: str, at_least: int) -> WrittenProblem:
    """The problem in a writer's answer. Raises NoProblem, also when it has fewer than `at_least` tests."""
    questions, tests = _QUESTION.findall(answer), _TESTS.findall(answer)
    if not questions or not tests or not questions[-1].strip():
        raise NoProblem(SeedRejection.NO_QUESTION, "the answer has no <question> with <tests>")
    asserts = list(_asserts(tests[-1]))[:_MOST_ASSERTS]
    names = Counter(name for name in map(_function_of, asserts) if name)
    entry_point = names.most_common(1)[0][0] if names else ""
    cases = list[CallCase]()
    for statement in asserts:
        with suppress(Rejected, RecursionError, MemoryError):
            cases.append(call_case(statement, entry_point))
    if len(cases) < at_least:
        detail = f"{len(cases)} of {len(asserts)} asserts can be read"
        raise NoProblem(SeedRejection.FEW_TESTS_WRITTEN, detail)
    prompt = f"{questions[-1].strip()}\n\nWrite the Python function `{entry_point}`."
    return WrittenProblem(prompt, entry_point, tuple(cases), len(asserts))


def _asserts(text: str) -> Iterator[ast.Assert]:
    """The asserts in a text; when it is no Python as a whole, those of its lines that are."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("```")]
    whole = _parsed("\n".join(lines))
    for statement in whole if whole is not None else (one for line in lines for one in _parsed(line.strip()) or ()):
        if isinstance(statement, ast.Assert):
            yield statement


def _parsed(text: str) -> list[ast.stmt] | None:
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _function_of(statement: ast.Assert) -> str:
    """The function that an assert calls; empty for an assert of another form."""
    match statement.test:
        case ast.Compare(left=ast.Call(func=ast.Name(id=name))):
            return name
        case _:
            return ""
