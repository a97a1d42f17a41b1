"""What the service knows of each language: names, versions, words of prompts, blocks of answers, packages, starter.

tests/golden/languages.json holds it for the languages that had tables before a table held all of this.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nouscoder.domain import languages
from nouscoder.domain.prompt import PromptForm, prompt_text, system_text
from nouscoder.domain.submission import language_name
from nouscoder.verifier.api.pages import playground
from nouscoder.verifier.grading.extract import extract_program
from nouscoder.verifier.toolchains.languages import registry

GOLDEN = Path(__file__).parents[1] / "golden" / "languages.json"
KNOWN: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf8"))
VERSIONS = (*map(str, [*range(27), *range(89, 100), 2015, 2018, 2021, 2024]), "3.11", "5.3", "5.4", "2.7", "1.8")
WORDS = ("(", "{", "print", "write", "def f", "class A", "x")


def versions(language: str, *, any_standard: bool) -> list[str]:
    """The versions with which each name of the language is this language, however they are written."""
    found = [
        [one for one in VERSIONS if language_name(form.format(name, one), any_standard=any_standard) == language]
        for name in KNOWN[language]["names"]
        for form in ("{}{}", "GNU {} {} (64)", "{} ({})")
    ]
    assert found == found[:1] * len(found)
    return found[0]


def counts(language: str, word: str) -> bool:
    """Whether a block without a tag and with this word is the program, and no later block with an unknown tag."""
    found = extract_program(f"```\n{word}\n```\n\n```unknown-tag\n?\n```\n", [language])
    assert found is not None
    return found.code == word


def facts(language: str) -> dict[str, Any]:
    """What users see of a language."""
    empty = prompt_text(PromptForm.ACEREASON, "P", "", (language,))
    tagged = {other: extract_program(f"```{other}\nx\n```", [language]) for other in KNOWN}
    return {
        "names": [one for one in KNOWN[language]["names"] if language_name(one.upper()) == language],
        "versions": versions(language, any_standard=False),
        "versions_of_tags": versions(language, any_standard=True),
        "system": system_text(PromptForm.LIVECODEBENCH, (language,)),
        "block": empty[empty.index("```") :],
        "starter_block": prompt_text(PromptForm.PLAIN, "P", "code", (language, "c")),
        "programs": [word for word in WORDS if counts(language, word)],
        "blocks": [other for other, found in tagged.items() if found is not None],
        "source": registry()[language].source_name,
        "packages": " ".join(languages.KNOWN[language].debian),
        "starter": languages.KNOWN[language].starter,
    }


@pytest.mark.parametrize("language", KNOWN)
def test_what_users_see_of_a_language_stays_as_it_was(language: str) -> None:
    assert facts(language) == KNOWN[language]


def test_every_starter_is_in_the_script_of_the_playground() -> None:
    script = playground(["python"]).text.partition("const LANGUAGES = ")[2].partition(";\n")[0]
    assert "<" not in script, "a starter could end the script element"
    assert {name: one["starter"] for name, one in json.loads(script).items()} == {
        name: one.starter for name, one in languages.KNOWN.items()
    }
