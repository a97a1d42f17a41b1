"""Named prompt formats: a problem as the messages of a chat.

`plain` is one user message with the problem's prompt, in its own template if it has one. `lcb` is LiveCodeBench's
(lcb_runner/prompts/code_generation.py): its system message, and the question in its form. Problems that
`nouscoder data import livecodebench` made are in that form already.
"""

from __future__ import annotations

from enum import StrEnum

from nouscoder.data.importers.livecodebench import prompt as lcb_prompt
from nouscoder.evaluation.problems import EvaluatedProblem, NothingToEvaluate

_LCB_QUESTION = "### Question:\n"
_LCB_SYSTEM = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a"
    " correct Python program that matches the specification and passes all tests."
)


class PromptFormat(StrEnum):
    """All formats."""

    PLAIN = "plain"
    LCB = "lcb"


def messages_of(problem: EvaluatedProblem, form: PromptFormat) -> list[dict[str, str]]:
    """The messages. Raises NothingToEvaluate for a problem that the format cannot express."""
    if form is PromptFormat.PLAIN:
        text = (
            problem.prompt_template.replace("{prompt}", problem.prompt) if problem.prompt_template else problem.prompt
        )
        return [{"role": "user", "content": text}]
    text = problem.prompt
    if not text.startswith(_LCB_QUESTION):
        if problem.tests_type != "stdin":
            raise NothingToEvaluate(
                f"--prompt lcb needs LiveCodeBench's starter code for {problem.problem_id}, which has"
                f" {problem.tests_type} tests; import the set with `nouscoder data import livecodebench`"
            )
        text = lcb_prompt(text, "")
    return [{"role": "system", "content": _LCB_SYSTEM}, {"role": "user", "content": text}]
