"""Extraction of the program from a model's answer.

The rule extends that of LiveCodeBench: the last fenced block counts, with or without a language tag, and an unclosed
last block extends to the end of the text. Reasoning up to the first `</think>` is ignored. Time and memory are linear
in the length of the text.
"""

from __future__ import annotations

import re

from nouscoder.domain.submission import MathTests, Submission

_THINK_OPEN = "<think>"
_THINK_CLOSE = "</think>"
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})([^\n]*)", re.MULTILINE)


def text_to_grade(submission: Submission) -> str | None:
    """The program of a submission, or the answer for math tests. None when there is nothing to grade."""
    if submission.code is not None:
        return submission.code
    completion = submission.completion or ""
    if not isinstance(submission.tests, MathTests):
        return extract_code(completion)
    answer = _without_reasoning(completion)
    return answer if answer.strip() else None


def extract_code(completion: str) -> str | None:
    """The program in `completion`. None when it holds no program; the verdict is then no_code."""
    answer = _without_reasoning(completion.replace("\r\n", "\n"))
    code = _last_block(answer)
    return code if code is not None and code.strip() else None


def _without_reasoning(completion: str) -> str:
    """The text after the reasoning. Reasoning that is opened and never closed leaves an empty text."""
    reasoning, closed, answer = completion.partition(_THINK_CLOSE)
    if closed:
        return answer
    return "" if _THINK_OPEN in reasoning else completion


def _last_block(text: str) -> str | None:
    """The lines inside the last fence. A fence ends at a bare fence line of its own character, as long or longer."""
    fence = ""
    begin = 0
    found: tuple[int, int] | None = None
    for match in _FENCE.finditer(text):
        marks, info = match.groups()
        if not fence:
            if "`" not in info:  # an inline ```x``` does not open a block
                fence, begin = marks, match.end() + 1
        elif marks[0] == fence[0] and len(marks) >= len(fence) and not info.strip():
            found, fence = (begin, match.start() - 1), ""
    if fence:
        found = (begin, len(text))
    return None if found is None else text[found[0] : found[1]]
