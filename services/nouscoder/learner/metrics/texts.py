"""Signs in what a policy writes that it collapses or hacks rewards. The guards of a run (run/guards.py) judge them."""

from __future__ import annotations

import re
from collections.abc import Sequence

_TAIL = 512  # tokens
_GRAM = 8  # tokens
_REPEATED_SHARE = 0.5


def ends_in_repetition(token_ids: Sequence[int]) -> bool:
    """Whether at least half of the 8-grams among the last 512 tokens occur there more than once.

    Repetition loops last until the rollout is cut, so they are at its end. Shorter rollouts than 64 tokens are not
    judged.
    """
    tail = tuple(token_ids[-_TAIL:])
    num_grams = len(tail) - _GRAM + 1
    if len(tail) < _TAIL // 8:
        return False
    distinct = len({tail[start : start + _GRAM] for start in range(num_grams)})
    return num_grams - distinct >= _REPEATED_SHARE * num_grams


_BLOCK = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_READS = re.compile(r"\b(input|stdin|open|fileinput|argv)\b")
_DEFINES = re.compile(r"^\s*(async\s+def|def|class)\b", re.MULTILINE)
_LITERAL_TEST = re.compile(r"^\s*(el)?if\b[^\n]*==\s*[\[({\"'\d-]")
_LITERAL_ANSWER = re.compile(r"^\s*(return|print\s*\()\s*[\[({\"'\d-][^\n]*$")
_MIN_CASES = 3
_MAX_PROGRAM = 100_000  # characters


def looks_hard_coded(text: str) -> bool:
    """Whether the Python program in `text`, its last fenced block or all of it, seems to know the tests' answers.

    Either it prints without reading an input or defining a function, or at least half of its lines compare with a
    literal or answer with one, in three cases or more. A heuristic for Python: it looks at lines, and runs nothing.
    """
    program = _program_in(text)
    code = _code_lines(program)
    if not code:
        return False
    if "print" in program and not _READS.search(program) and not _DEFINES.search(program):
        return True
    tests = sum(bool(_LITERAL_TEST.match(line)) for line in code)
    answers = sum(bool(_LITERAL_ANSWER.match(line)) for line in code)
    return min(tests, answers) >= _MIN_CASES and 2 * (tests + answers) >= len(code)


def repeated_share(texts: Sequence[str]) -> float | None:
    """(n - distinct) / (n - 1) of the programs in the texts of a group: 0 if all differ, 1 if all are the same.

    The program is the last fenced block, or the whole text. Empty lines, comment lines and blanks at the end of a line
    do not count. None for fewer than two texts.
    """
    if len(texts) < 2:
        return None
    programs = {tuple(line.rstrip() for line in _code_lines(_program_in(text))) for text in texts}
    return (len(texts) - len(programs)) / (len(texts) - 1)


def _program_in(text: str) -> str:
    blocks = _BLOCK.findall(text)
    return str(blocks[-1] if blocks else text)[:_MAX_PROGRAM]


def _code_lines(program: str) -> list[str]:
    return [line for line in program.splitlines() if line.strip() and not line.lstrip().startswith("#")]
