"""What a policy is asked: the form in which a problem becomes a text, or the messages of a chat.

Training, evaluation, fine-tuning, the count of tokens before a run, and importers all take the text from here, so it is
the same text everywhere.

The form `livecodebench` is the one that LiveCodeBench gives to chat models (LiveCodeBench/LiveCodeBench at 28fef95,
lcb_runner/prompts/code_generation.py: SYSTEM_MESSAGE_GENERIC and get_generic_question_template_answer, in the order of
format_prompt_generation for LMStyle.OpenAIChat). It has two wordings: with starter code, and for stdin. Its variants
for Qwen and DeepSeek-R1 models write the special tokens of one chat template into the text; here the policy's own
template writes them.

`deepcoder` is that of DeepCoder's training (rllm, rllm/data/utils.py: fetch_live_code_bench_system_prompt): the same
sentences in one user's message. Klear-Reasoner's training data begin so too (Kwai-Klear/KlearReasoner, README.md).
`acereason` is that of AceReason-Nemotron's model card (Usage Recommendations; it wants no system message).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, Self

from nouscoder.domain.conversation import Message, Role

PYTHON = ("python",)
PROMPT = "{prompt}"  # in a template, the place of the problem
AUTO = "auto"  # the system message of the form


class PromptForm(StrEnum):
    """All forms. PLAIN: the problem's statement, and the code to begin with if there is any."""

    PLAIN = "plain"
    LIVECODEBENCH = "livecodebench"
    DEEPCODER = "deepcoder"
    ACEREASON = "acereason"


class AskedProblem(Protocol):
    """The fields of a problem that its prompt is made of."""

    @property
    def prompt(self) -> str: ...  # noqa: D102

    @property
    def prompt_template(self) -> str: ...  # noqa: D102

    @property
    def starter_code(self) -> str: ...  # noqa: D102

    @property
    def languages(self) -> tuple[str, ...]: ...  # noqa: D102


class PromptText(NamedTuple):
    """What the prompt of a problem is made of. `template` is the problem's own; empty: that of the settings."""

    prompt: str
    template: str = ""
    starter_code: str = ""
    languages: tuple[str, ...] = PYTHON

    @classmethod
    def of(cls, problem: AskedProblem) -> Self:
        """That of a problem."""
        return cls(problem.prompt, problem.prompt_template, problem.starter_code, tuple(problem.languages))


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """How problems are asked. A problem with a template of its own is asked in that, without form and system message.

    `prompt_template` stands around the form. `system_prompt` "auto" is the form's own system message, of which `plain`
    has none; an empty one is no message.
    """

    prompt_form: PromptForm = PromptForm.PLAIN
    prompt_template: str = PROMPT
    system_prompt: str = AUTO

    def text(self, asked: PromptText) -> str:
        """The whole prompt, or the user's message."""
        form, template = (self.prompt_form, self.prompt_template)
        if asked.template:
            form, template = PromptForm.PLAIN, asked.template
        return prompt_text(form, asked.prompt, asked.starter_code, asked.languages, template)

    def messages(self, asked: PromptText) -> list[Message]:
        """A system message, if there is one, and the user's."""
        system = self.system_prompt
        if system == AUTO:
            system = "" if asked.template else system_text(self.prompt_form, asked.languages)
        return [*([Message(Role.SYSTEM, system)] if system else []), Message(Role.USER, self.text(asked))]


def prompt_text(
    form: PromptForm,
    prompt: str,
    starter_code: str = "",
    languages: tuple[str, ...] = PYTHON,
    template: str = PROMPT,
) -> str:
    """The problem in a form, within `template`, for an answer in one of `languages`.

    A `prompt` that an earlier import has put into a form already is recognised: it is not put into one twice.
    """
    if form is not PromptForm.PLAIN and not starter_code:
        prompt, starter_code = _parted(prompt)
    # Not str.format, because a problem's statement may contain braces.
    return template.replace(PROMPT, _FORMS[form](prompt, starter_code, languages))


def system_text(form: PromptForm, languages: tuple[str, ...] = PYTHON) -> str:
    """The system message of a form; empty when it has none."""
    return _LCB_SYSTEM if form is PromptForm.LIVECODEBENCH else ""


# The statement with the code to begin with.

_STARTER = "\n\nBegin with this code:\n```python\n"
_STARTER_END = "\n```\n"


def _with_starter_code(question: str, starter_code: str, languages: tuple[str, ...]) -> str:
    if not starter_code.strip():
        return question
    return f"{question.rstrip()}{_STARTER}{starter_code.strip()}{_STARTER_END}"


def _parted(prompt: str) -> tuple[str, str]:
    """The question and the starter code of a prompt that `_with_starter_code` has made; else the prompt and no code."""
    question, begins, code = prompt.rpartition(_STARTER)
    return (question, code.removesuffix(_STARTER_END)) if begins and code.endswith(_STARTER_END) else (prompt, "")


# LiveCodeBench's form, and DeepCoder's of the same sentences.

_LCB_SYSTEM = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a"
    " correct Python program that matches the specification and passes all tests."
)
_LCB_QUESTION = "### Question:\n"
_LCB_ANSWER = "### Answer: (use the provided format with backticks)\n\n"
_LCB_STARTER = (
    "You will use the following starter code to write the solution to the problem and enclose your code within"
    " delimiters."
)
_LCB_STDIN = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on the sample"
    " inputs). Enclose your code within delimiters as follows. Ensure that when the python program runs, it reads the"
    " inputs, runs the algorithm and writes output to STDOUT."
)


def _livecodebench(question: str, starter_code: str, languages: tuple[str, ...]) -> str:
    if question.startswith(_LCB_QUESTION) and question.endswith(_LCB_ANSWER):
        return question
    return f"{_LCB_QUESTION}{question}\n\n{_format_and_answer(starter_code, languages)}"


def _deepcoder(question: str, starter_code: str, languages: tuple[str, ...]) -> str:
    return f"{_LCB_SYSTEM}\n\n{question}{_format_and_answer(starter_code, languages)}"


def _format_and_answer(starter_code: str, languages: tuple[str, ...]) -> str:
    how, code = (_LCB_STARTER, starter_code) if starter_code else (_LCB_STDIN, "# YOUR CODE HERE")
    return f"### Format: {how}\n```python\n{code}\n```\n\n{_LCB_ANSWER}"


# AceReason's form.

_ACE_STARTER = "Solve the problem starting with the provided function header.\n\nFunction header:\n"
_ACE_STDIN = "Write Python code to solve the problem. "
_ACE_ANSWER = "Please place the solution code in the following format:\n```python\n# Your solution code here\n```"


def _acereason(question: str, starter_code: str, languages: tuple[str, ...]) -> str:
    if starter_code:
        return f"{question}\n\n{_ACE_STARTER}```\n{starter_code}\n```\n\n{_ACE_ANSWER}"
    return f"{question}\n\n{_ACE_STDIN}{_ACE_ANSWER}"


_FORMS: dict[PromptForm, Callable[[str, str, tuple[str, ...]], str]] = {
    PromptForm.PLAIN: _with_starter_code,
    PromptForm.LIVECODEBENCH: _livecodebench,
    PromptForm.DEEPCODER: _deepcoder,
    PromptForm.ACEREASON: _acereason,
}
