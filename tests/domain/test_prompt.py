"""Forms of a prompt: the published words, with starter code and for stdin, and what earlier imports have written."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from nouscoder.data.importers.formats import format_named
from nouscoder.domain.conversation import Message, Role
from nouscoder.domain.problem import Problem
from nouscoder.domain.prompt import PromptForm, PromptSettings, PromptText, prompt_text, rendered_mark, system_text
from nouscoder.domain.submission import StdinTests

LCB = PromptForm.LIVECODEBENCH
STARTER = "class Solution:\n    def add(self, a: int, b: int) -> int:\n        "
SYSTEM = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a"
    " correct Python program that matches the specification and passes all tests."
)
# LiveCodeBench/LiveCodeBench, lcb_runner/prompts/code_generation.py, get_generic_question_template_answer.
STDIN = (
    "### Question:\nAdd {a} and b.\n\n### Format: Read the inputs from stdin solve the problem and write the answer to"
    " stdout (do not directly test on the sample inputs). Enclose your code within delimiters as follows. Ensure that"
    " when the python program runs, it reads the inputs, runs the algorithm and writes output to STDOUT.\n"
    "```python\n# YOUR CODE HERE\n```\n\n### Answer: (use the provided format with backticks)\n\n"
)
FUNCTION = (
    "### Question:\nAdd {a} and b.\n\n### Format: You will use the following starter code to write the solution to the"
    f" problem and enclose your code within delimiters.\n```python\n{STARTER}\n```\n\n"
    "### Answer: (use the provided format with backticks)\n\n"
)
QUESTION = "Add {a} and b."
BEGIN = f"{QUESTION}\n\nBegin with this code:\n```python\n{STARTER.strip()}\n```\n"


def test_livecodebench_has_two_wordings_and_a_system_message() -> None:
    assert prompt_text(LCB, QUESTION) == STDIN
    assert prompt_text(LCB, QUESTION, STARTER) == FUNCTION
    assert prompt_text(PromptForm("lcb"), QUESTION, template="Now:\n{prompt}") == f"Now:\n{STDIN}"
    assert system_text(LCB) == SYSTEM
    assert [one for one in PromptForm if system_text(one)] == [LCB, PromptForm.NOUSCODER]


def test_plain_is_the_statement_and_the_code_to_begin_with() -> None:
    assert prompt_text(PromptForm.PLAIN, QUESTION) == QUESTION
    assert prompt_text(PromptForm.PLAIN, f"{QUESTION}\n", STARTER) == BEGIN


def test_deepcoder_says_it_in_one_message_and_acereason_in_words_of_its_own() -> None:
    for starter, text in (("", STDIN), (STARTER, FUNCTION)):
        said = text.removeprefix("### Question:\n").replace("b.\n\n### Format", "b.### Format")
        assert prompt_text(PromptForm.DEEPCODER, QUESTION, starter) == f"{SYSTEM}\n\n{said}"
    end = "Please place the solution code in the following format:\n```python\n# Your solution code here\n```"
    assert prompt_text(PromptForm.ACEREASON, QUESTION) == f"{QUESTION}\n\nWrite Python code to solve the problem. {end}"
    assert prompt_text(PromptForm.ACEREASON, QUESTION, STARTER) == (
        f"{QUESTION}\n\nSolve the problem starting with the provided function header.\n\nFunction header:\n"
        f"```\n{STARTER}\n```\n\n{end}"
    )


@pytest.mark.parametrize("earlier", [STDIN, FUNCTION])
def test_a_prompt_that_an_earlier_import_has_put_into_the_form_is_not_put_into_it_twice(earlier: str) -> None:
    assert prompt_text(LCB, earlier) == earlier
    assert prompt_text(PromptForm.PLAIN, earlier) == earlier
    whole = prompt_text(PromptForm.DEEPCODER, QUESTION)  # as Klear-Reasoner's data are
    assert prompt_text(PromptForm.DEEPCODER, whole) == whole
    with_header = f"{SYSTEM}\n\n{earlier.rstrip()}\n"  # as `query` of LeetCodeDataset 0.3
    for given in (earlier, whole, with_header, prompt_text(PromptForm.NOUSCODER, QUESTION, STARTER, tests_type="call")):
        assert {prompt_text(form, given) for form in PromptForm} == {given}


def test_the_starter_code_that_an_earlier_import_has_written_into_the_prompt_is_found() -> None:
    assert prompt_text(LCB, BEGIN) == FUNCTION.replace(STARTER, STARTER.strip())
    assert prompt_text(PromptForm.PLAIN, BEGIN) == BEGIN


def test_a_problem_with_its_own_template_is_asked_in_that_alone() -> None:
    settings = PromptSettings(prompt_form=LCB, prompt_template="<{prompt}>")
    asked = PromptText("1 + 1?", "{prompt} Write \\boxed{}.")
    assert settings.messages(asked) == [Message(Role.USER, "1 + 1? Write \\boxed{}.")]
    code = PromptText(QUESTION, "", STARTER)
    assert settings.messages(code) == [Message(Role.SYSTEM, SYSTEM), Message(Role.USER, f"<{FUNCTION}>")]


@pytest.mark.parametrize(
    ("system_prompt", "wanted"), [("auto", SYSTEM), ("", None), ("Be brief.", "Be brief.")], ids=["auto", "none", "own"]
)
def test_a_system_message_is_that_of_the_form_unless_one_is_given(system_prompt: str, wanted: str | None) -> None:
    system = [one.content for one in PromptSettings("messages", LCB, system_prompt=system_prompt).messages(ASKED)[:-1]]
    assert system == ([] if wanted is None else [wanted])


ASKED = PromptText.of(Problem("p", QUESTION, StdinTests(())))


def test_prompt_as_auto_depends_on_the_policy_and_words_describe_all() -> None:
    settings = PromptSettings(prompt_form=LCB, thinking="on", system_prompt="Be brief.", prompt_template="{prompt}!")
    assert settings.resolved(has_chat_template=True).described == (
        "messages, form livecodebench, a template around it, thinking on, its own system prompt"
    )
    assert settings.resolved(has_chat_template=False).described == "text, form livecodebench, a template around it"
    assert PromptSettings("text").resolved(has_chat_template=True).prompt_as == "text"
    assert PromptSettings(**asdict(settings)) == settings


def test_importers_keep_the_bare_question_and_its_starter_code_apart() -> None:
    tests = '[{"input": "1", "output": "1", "testtype": "stdin"}]'
    rows = [
        ("livecodebench", {"question_id": "p", "question_content": QUESTION, "public_test_cases": tests}),
        ("taco", {"question": QUESTION, "input_output": '{"inputs": ["1"], "outputs": ["1"]}'}),
        ("deepcoder", {"problem": QUESTION, "tests": tests}),
    ]
    for name, row in rows:
        problem = format_named(name).read({**row, "starter_code": STARTER}, 1).problem
        assert (problem.prompt, problem.starter_code) == (QUESTION, STARTER)


NOUSCODER = PromptForm.NOUSCODER
# NousResearch/atropos at 296a0bc5 (MIT), environments/code_execution_server/coding_server.py, get_prompt.
NOUS_ANSWER = "### Answer: (use the provided format with backticks)\n\n"
NOUS_STDIN = (
    "Question: Add {a} and b.\n\nRead the inputs from stdin, solve the problem, and write the answer to stdout (do not"
    " directly test on the sample inputs). Enclose your code within delimiters as follows. Ensure that when the python"
    " program runs it reads the inputs runs the algorithm and writes output to STDOUT.\n"
    f"```python\n# YOUR CODE HERE\n```\n\n{NOUS_ANSWER}"
)
NOUS_FUNCTION = (
    "Question: Add {a} and b.\n\nYou will use the following starter code to write the solution to the problem and"
    f" enclose your code within delimiters.\n```python\n{STARTER}\n```\n\n{NOUS_ANSWER}"
)


@pytest.mark.parametrize(
    ("tests_type", "starter", "text"),
    [
        ("stdin", "", NOUS_STDIN),
        ("stdin", STARTER, NOUS_STDIN),  # the authors' code looks at the type first
        ("call", STARTER, NOUS_FUNCTION),
        ("call", "", f"Question: Add {{a}} and b.\n\n{NOUS_ANSWER}"),
        ("assert", "", f"Question: Add {{a}} and b.\n\n{NOUS_ANSWER}"),
    ],
)
def test_nouscoder_asks_as_the_authors_environment_and_tells_no_function_to_read_stdin(
    tests_type: str, starter: str, text: str
) -> None:
    asked = PromptText(QUESTION, "", starter, tests_type=tests_type)
    settings = PromptSettings("messages", NOUSCODER)
    assert settings.messages(asked) == [Message(Role.SYSTEM, SYSTEM), Message(Role.USER, text)]
    assert not settings.misleads(asked)
    assert settings.text(asked) == text


def test_a_function_without_starter_code_is_asked_as_the_authors_of_each_form_ask_it() -> None:
    """rllm/data/utils.py and tinker_cookbook/recipes/code_rl/code_env.py look at the starter code alone."""
    told = {form: PromptSettings(prompt_form=form).text(PromptText(QUESTION, tests_type="call")) for form in PromptForm}
    assert told[LCB] == f"### Question:\n{QUESTION}\n\n{NOUS_ANSWER}", "LiveCodeBench has none"
    said = STDIN.removeprefix("### Question:\n").replace("b.\n\n### Format", "b.### Format")
    assert told[PromptForm.DEEPCODER] == f"{SYSTEM}\n\n{said}"
    assert [form for form, text in told.items() if "stdin" in text] == [PromptForm.DEEPCODER]
    assert told[PromptForm.ACEREASON].startswith(f"{QUESTION}\n\nWrite Python code to solve the problem. Please place")


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("<|im_start|>user\nRead n.<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>"),
        ("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nRead n.<|eot_id|>", "<|start_header_id|>"),
        ("<s>[INST] Read n. [/INST]", "[INST]"),
        ("<bos><start_of_turn>user\nRead n.<end_of_turn>\n", "<start_of_turn>"),
        (
            "<\uff5cbegin\u2581of\u2581sentence\uff5c><\uff5cUser\uff5c>Read n.<\uff5cAssistant\uff5c>",
            "<\uff5cUser\uff5c>",
        ),
        ("[gMASK]<sop><|user|>\nRead n.<|assistant|>", "<|user|>"),
        ("<|start|>system<|message|>You are.<|end|>", "<|start|>system"),
        ("<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Read n.[/INST]", "[SYSTEM_PROMPT]"),
        ("Count how often <|im_start|> stands in a text.", ""),
        ("<s>This</s> is HTML: strike it out.", ""),
        ("### Question:\nRead n.", ""),
        ("", ""),
    ],
)
def test_a_text_that_a_chat_template_has_written_is_known_by_its_begin(text: str, mark: str) -> None:
    assert rendered_mark(text) == mark
