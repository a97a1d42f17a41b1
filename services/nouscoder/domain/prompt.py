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
`nouscoder` is that of NousCoder-14B's environment (NousResearch/atropos, environments/code_execution_server,
coding_server.py: system_prompt and get_prompt): LiveCodeBench's system message and words, with a header and commas of
its own, and without a word about stdin for a function that has no starter code.
`acereason` is that of AceReason-Nemotron's model card (Usage Recommendations; it wants no system message).

The published words ask for Python. For problems of other languages, the name and the tag of the block are theirs; where
a problem allows several languages the words name them all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, Protocol, Self

from nouscoder.domain.conversation import Message, Role
from nouscoder.domain.languages import KNOWN

PYTHON = ("python",)
PROMPT = "{prompt}"  # in a template, the place of the problem
AUTO = "auto"
_LANGUAGE, _BLOCK = "{language}", "{block}"
_READ_STDIN = ("stdin", "checker", "interactive")  # types of tests


class PromptForm(StrEnum):
    """All forms. PLAIN: the problem's statement, and the code to begin with if there is any."""

    PLAIN = "plain"
    LIVECODEBENCH = "livecodebench"
    NOUSCODER = "nouscoder"
    DEEPCODER = "deepcoder"
    ACEREASON = "acereason"

    @classmethod
    def _missing_(cls, value: object) -> PromptForm | None:
        return cls.LIVECODEBENCH if value == "lcb" else None


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

    @property
    def tests_type(self) -> str: ...  # noqa: D102


class PromptText(NamedTuple):
    """What the prompt of a problem is made of. `template` is the problem's own; empty: that of the settings.

    `tests_type` is the type of its tests: stdin, checker and interactive test whole programs, others functions.
    """

    prompt: str
    template: str = ""
    starter_code: str = ""
    languages: tuple[str, ...] = PYTHON
    tests_type: str = "stdin"

    @property
    def is_program(self) -> bool:
        """Whether it asks for a whole program, which reads stdin."""
        return self.tests_type in _READ_STDIN

    @classmethod
    def of(cls, problem: AskedProblem) -> Self:
        """That of a problem."""
        about = (problem.prompt, problem.prompt_template, problem.starter_code)
        return cls(*about, tuple(problem.languages), problem.tests_type)


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """How problems are asked. A problem with a template of its own is asked in that, without form and system message.

    `prompt_as` is messages (in the policy's chat template), text, or auto: messages if the policy has a template.
    `prompt_template` stands around the form. `system_prompt` "auto" is the form's own system message, of which `plain`
    has none; an empty one is no message. `thinking` is on, off or auto, as the chat template has it by default.
    `date` is the day that a chat template writes as the present one, such as 2026-11-28; empty: it writes none.
    """

    prompt_as: str = AUTO
    prompt_form: PromptForm = PromptForm.PLAIN
    prompt_template: str = PROMPT
    system_prompt: str = AUTO
    thinking: str = AUTO
    date: str = ""

    @property
    def enable_thinking(self) -> bool | None:
        """The value of that name which the chat template gets; None gives it none."""
        return {"on": True, "off": False}.get(self.thinking)

    @property
    def described(self) -> str:
        """For people, in a few words."""
        parts = [self.prompt_as, f"form {self.prompt_form}"]
        parts += ["a template around it"] if self.prompt_template != PROMPT else []
        if self.prompt_as != "text":
            parts += [f"thinking {self.thinking}"] if self.thinking != AUTO else []
            parts += ["its own system prompt"] if self.system_prompt not in ("", AUTO) else []
            parts += [f"date {self.date}"] if self.date else []
        return ", ".join(parts)

    def resolved(self, has_chat_template: bool) -> Self:
        """With `prompt_as` as it is for a policy."""
        if self.prompt_as != AUTO:
            return self
        return replace(self, prompt_as="messages" if has_chat_template else "text")

    def text(self, asked: PromptText) -> str:
        """The whole prompt, or the user's message."""
        form, template = (self.prompt_form, self.prompt_template)
        if asked.template:
            form, template = PromptForm.PLAIN, asked.template
        return prompt_text(form, asked.prompt, asked.starter_code, asked.languages, template, asked.tests_type)

    def misleads(self, asked: PromptText) -> bool:
        """Whether the form asks for a program that reads stdin, and the tests are others: starter code is missing.

        DeepCoder's authors ask so; the other forms say nothing of stdin then.
        """
        if self.prompt_form is not PromptForm.DEEPCODER or asked.template or asked.is_program:
            return False
        return not (asked.starter_code or asked.prompt.startswith(_LCB_QUESTION) or _parted(asked.prompt)[1])

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
    tests_type: str = "stdin",
) -> str:
    """The problem in a form, within `template`, for an answer in one of `languages`, tested by tests of this type.

    In the template {language} is the name of the language, and {block} the begin of its block. Where neither is there,
    the plain form names them, unless the language is Python. A `prompt` that an earlier import has put into a form
    already is recognised: it is not put into one twice.
    """
    if form is not PromptForm.PLAIN and not starter_code:
        prompt, starter_code = _parted(prompt)
    is_in_one = prompt.startswith(_lcb_system(PYTHON)) or prompt.rstrip().endswith(_LCB_ANSWER.rstrip())
    asked = PromptText(prompt, "", starter_code, languages, tests_type)
    text = prompt if is_in_one and form is not PromptForm.PLAIN else _FORMS[form](asked)
    which, block = _written(languages), _tags(languages)
    if form is PromptForm.PLAIN and languages != PYTHON and not (_LANGUAGE in template or _BLOCK in template):
        text = f"{text.rstrip()}\n\nWrite the program in {which}, in a block that begins with {block}.\n"
    # Not str.format, because a problem's statement may contain braces.
    return template.replace(_LANGUAGE, which).replace(_BLOCK, block).replace(PROMPT, text)


# What begins a turn in known chat templates (ChatML, Llama 2 to 4, Gemma, Mistral, Phi, GLM, DeepSeek, gpt-oss, Cohere,
# Granite, OLMo, Kimi, MiniMax, Seed), after the tokens that begin a text.
_RENDERED = re.compile(
    r"\s*((?:<s>|<bos>|<BOS_TOKEN>|<seed:bos>|<\|(?:begin_of_text|startoftext|endoftext)\|>|\[gMASK\]|<sop>|\]~!b\["
    r"|<\uff5cbegin\u2581of\u2581sentence\uff5c>)\s*)*"
    r"(<\|im_(?:start|system|user)\|>|<\|start_header_id\|>|<\|header_start\|>|<\|start_of_role\|>|<start_of_turn>"
    r"|<\|turn>|\[(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS)\]|<<SYS>>|<\|(?:system|user|assistant|developer)\|>"
    r"|<[\uff5c|](?:User|Assistant|System)[\uff5c|]>|<\|start\|>(?:system|developer|user)|<\|START_OF_TURN_TOKEN\|>"
    r"|\]~b\]|<extra_id_[01]>(?:System|User))"
)


def rendered_mark(text: str) -> str:
    """The mark of a chat template with which a text begins; empty for a text that no chat template has written.

    A run puts the text of a problem into the policy's own template. One that begins so has gone through a template
    already: its marks would be spelled as characters within another turn.
    """
    found = _RENDERED.match(text)
    return found[2] if found else ""


def system_text(form: PromptForm, languages: tuple[str, ...] = PYTHON) -> str:
    """The system message of a form; empty when it has none."""
    return _lcb_system(languages) if form in (PromptForm.LIVECODEBENCH, PromptForm.NOUSCODER) else ""


def _choice(words: Iterable[str]) -> str:
    """One of several: a; a or b; a, b or c."""
    *firsts, last = dict.fromkeys(words)
    return f"{', '.join(firsts)} or {last}" if firsts else last


# For Python alone the words are the published ones.
def _written(languages: tuple[str, ...]) -> str:
    return _choice(KNOWN[language].written for language in languages)


def _tags(languages: tuple[str, ...]) -> str:
    return _choice(f"```{KNOWN[language].tag}" for language in languages)


def _empty_block(languages: tuple[str, ...], words: str) -> str:
    """A block in the first language with a comment, and how to name another one where there are several."""
    block = f"```{KNOWN[languages[0]].tag}\n{KNOWN[languages[0]].comment} {words}\n```"
    if len(languages) == 1:
        return block
    return f"{block}\nThe program may be in {_written(languages)}: begin the block with {_tags(languages)}."


_STARTER = "\n\nBegin with this code:\n```python\n"
_STARTER_END = "\n```\n"


def _with_starter_code(asked: PromptText) -> str:
    if not asked.starter_code.strip():
        return asked.prompt
    starter = _STARTER.replace("python", KNOWN[asked.languages[0]].tag)
    return f"{asked.prompt.rstrip()}{starter}{asked.starter_code.strip()}{_STARTER_END}"


def _parted(prompt: str) -> tuple[str, str]:
    """The question and the starter code of a prompt that `_with_starter_code` has made; else the prompt and no code."""
    question, begins, code = prompt.rpartition(_STARTER)
    return (question, code.removesuffix(_STARTER_END)) if begins and code.endswith(_STARTER_END) else (prompt, "")


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


def _lcb_system(languages: tuple[str, ...]) -> str:
    who, what = f"{KNOWN[languages[0]].written} programmer", f"{KNOWN[languages[0]].written} program"
    if len(languages) > 1:
        who, what = "programmer", f"program in {_written(languages)}"
    return (
        f"You are an expert {who}. You will be given a question (problem specification) and will generate a"
        f" correct {what} that matches the specification and passes all tests."
    )


def _livecodebench(asked: PromptText) -> str:
    """LiveCodeBench has no function without starter code: here such a one has no format."""
    how = _lcb_format(asked) if asked.starter_code or asked.is_program else ""
    return f"{_LCB_QUESTION}{asked.prompt}\n\n{how}{_LCB_ANSWER}"


def _deepcoder(asked: PromptText) -> str:
    return f"{_lcb_system(asked.languages)}\n\n{asked.prompt}{_lcb_format(asked)}{_LCB_ANSWER}"


def _lcb_format(asked: PromptText) -> str:
    return f"### Format: {_in_starter(asked) if asked.starter_code else _in_block(asked, _LCB_STDIN)}"


def _in_starter(asked: PromptText) -> str:
    return f"{_LCB_STARTER}\n```{KNOWN[asked.languages[0]].tag}\n{asked.starter_code}\n```\n\n"


def _in_block(asked: PromptText, words: str) -> str:
    how = words if asked.languages == PYTHON else words.replace("the python program", "the program")
    return f"{how}\n{_empty_block(asked.languages, 'YOUR CODE HERE')}\n\n"


_NOUS_STDIN = (
    "Read the inputs from stdin, solve the problem, and write the answer to stdout (do not directly test on the sample"
    " inputs). Enclose your code within delimiters as follows. Ensure that when the python program runs it reads the"
    " inputs runs the algorithm and writes output to STDOUT."
)


def _nouscoder(asked: PromptText) -> str:
    how = _in_block(asked, _NOUS_STDIN) if asked.is_program else _in_starter(asked) if asked.starter_code else ""
    return f"Question: {asked.prompt}\n\n{how}{_LCB_ANSWER}"


_ACE_STARTER = "Solve the problem starting with the provided function header.\n\nFunction header:\n"
_ACE_ANSWER = "Please place the solution code in the following format:\n"


def _acereason(asked: PromptText) -> str:
    answer = _ACE_ANSWER + _empty_block(asked.languages, "Your solution code here")
    if asked.starter_code:
        return f"{asked.prompt}\n\n{_ACE_STARTER}```\n{asked.starter_code}\n```\n\n{answer}"
    return f"{asked.prompt}\n\nWrite {_written(asked.languages)} code to solve the problem. {answer}"


_FORMS: dict[PromptForm, Callable[[PromptText], str]] = {
    PromptForm.PLAIN: _with_starter_code,
    PromptForm.LIVECODEBENCH: _livecodebench,
    PromptForm.NOUSCODER: _nouscoder,
    PromptForm.DEEPCODER: _deepcoder,
    PromptForm.ACEREASON: _acereason,
}
