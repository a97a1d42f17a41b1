"""The words of a prompt name the languages of its problem. For Python alone they are the published ones."""

from __future__ import annotations

import pytest

from nouscoder.domain.prompt import PromptForm, prompt_text, system_text
from nouscoder.domain.submission import LANGUAGES
from nouscoder.run.starter import starter
from nouscoder.verifier.grading.extract import extract_program

FORMS = [PromptForm.LIVECODEBENCH, PromptForm.DEEPCODER, PromptForm.ACEREASON]


@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_asks_for_its_language_and_for_no_other(form: PromptForm) -> None:
    """Each form asked for Python whatever the problem's language, so a policy could not be right."""
    for language in sorted(LANGUAGES - {"python", "pypy"}):
        for starter_code in ("", "int f() {"):
            said = system_text(form, (language,)) + prompt_text(form, "Add.", starter_code, (language,))
            assert "ython" not in said, (language, starter_code)
            assert f"```{language}\n" in said
            found = extract_program(said, [language])
            assert found is None or found.language == language
    both = system_text(form, ("cpp", "python")) + prompt_text(form, "Add.", "", ("cpp", "python"))
    assert "C++ or Python" in both
    assert "```cpp or ```python" in both


def test_the_bare_statement_names_a_language_that_is_not_python() -> None:
    assert prompt_text(PromptForm.PLAIN, "Add.") == "Add."
    end = "Write the program in C++, in a block that begins with ```cpp.\n"
    assert prompt_text(PromptForm.PLAIN, "Add.", "", ("cpp",)) == f"Add.\n\n{end}"
    started = prompt_text(PromptForm.PLAIN, "Add.", "int f() {", ("cpp",))
    assert started == f"Add.\n\nBegin with this code:\n```cpp\nint f() {{\n```\n\n{end}"
    assert prompt_text(PromptForm.PLAIN, "Add.", "", ("rust", "go", "python")).endswith(
        "Write the program in Rust, Go or Python, in a block that begins with ```rust, ```go or ```python.\n"
    )


def test_a_template_may_name_the_language() -> None:
    """The template of `nouscoder init` asked for Python whatever the problem's language was."""
    template = starter("model", "problems.jsonl", "run")["generation"]["environment"]["prompt_template"]
    for languages, wanted in (
        (("python",), "Write the solution in Python, in one block that begins with ```python."),
        (("cpp",), "Write the solution in C++, in one block that begins with ```cpp."),
        (("go", "python"), "Write the solution in Go or Python, in one block that begins with ```go or ```python."),
    ):
        assert prompt_text(PromptForm.PLAIN, "Add {language}.", "", languages, template) == (
            f"Add {{language}}.\n\n{wanted}"
        )


def test_the_words_for_cpp_are_those_of_livecodebench_with_its_name() -> None:
    assert system_text(PromptForm.LIVECODEBENCH, ("cpp",)) == (
        "You are an expert C++ programmer. You will be given a question (problem specification) and will generate a"
        " correct C++ program that matches the specification and passes all tests."
    )
    assert prompt_text(PromptForm.LIVECODEBENCH, "Add.", "", ("cpp",)) == (
        "### Question:\nAdd.\n\n### Format: Read the inputs from stdin solve the problem and write the answer to stdout"
        " (do not directly test on the sample inputs). Enclose your code within delimiters as follows. Ensure that when"
        " the program runs, it reads the inputs, runs the algorithm and writes output to STDOUT.\n```cpp\n"
        "// YOUR CODE HERE\n```\n\n### Answer: (use the provided format with backticks)\n\n"
    )
