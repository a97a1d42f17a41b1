"""Finds the test functions of a file for pytest, without parsing it. Pure.

The time is linear in the length of the text, which comes from a client: Python's parser can take seconds for 200,000
characters. Comments and texts are skipped; a function that a file defines only under a condition is not found.
"""

from __future__ import annotations

import re

_MAX_CHARS = 200_000  # of asserts, as in verifier/grading/validation.py
_WORD = re.compile(
    r"""
    \#[^\n]*
    | \"\"\" (?: [^\\"] | \\. | "(?!"") )* (?: \"\"\" | \Z )?   # a text without an end takes the rest
    | \'\'\' (?: [^\\'] | \\. | '(?!'') )* (?: \'\'\' | \Z )?
    | " (?: [^\\"\n] | \\. )* "?
    | ' (?: [^\\'\n] | \\. )* '?
    | ^ class [ \t]+ (?P<class> [A-Za-z_]\w* ) [ \t]* (?P<bases> \( [^)\n]{0,200} )?
    | ^ (?P<indent> [ \t]* ) (?: async [ \t]+ )? def [ \t]+ (?P<test> test\w* ) [ \t]* \(
    | ^ (?P<other> [^\s\#"')\]}] )
    """,
    re.VERBOSE | re.MULTILINE | re.DOTALL | re.ASCII,
)


def test_names(text: str) -> list[str]:
    """The names of the test functions, in their order: `test_f`, and `TestF::test_one` for a method of a class.

    None for a text that is too long to be graded.
    """
    if len(text) > _MAX_CHARS:
        return []
    found: dict[str, None] = {}
    owner, column = "", ""
    for match in _WORD.finditer(text):
        if match["class"]:
            is_tests = match["class"].startswith("Test") or "TestCase" in (match["bases"] or "")
            owner, column = match["class"] if is_tests else "", ""
        elif match["test"] and not match["indent"]:
            owner = ""
            found[match["test"]] = None
        elif match["test"] and owner and match["indent"] == (column or match["indent"]):
            column = match["indent"]
            found[f"{owner}::{match['test']}"] = None
        elif match["other"]:
            owner = ""
    return list(found)
