"""The test functions of a file for pytest are found without parsing it, in the order of the file."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nouscoder.formats.public_shapes import test_names as names_of

NAME = st.sampled_from(["test", "test_a", "test_b", "testc", "test_1"])
NOISE = st.sampled_from(
    [
        '"""\ndef test_text(): pass\n"""',
        "x = '''\nclass TestText:\n    def test_text(self): pass\n'''",
        "# def test_comment(): pass",
        'y = "\\"" + "# "',
        "def helper(a):\n    def test_inner(): pass\n    return a",
        "class Helper:\n    def test_helper(self): pass",
        "import os",
        "@decorated(\n    1,\n)",
    ]
)


@st.composite
def files(draw: st.DrawFn) -> str:
    """Files of test functions, classes of tests, and text that only looks like them."""
    parts = []
    for _ in range(draw(st.integers(0, 5))):
        noise = draw(st.lists(NOISE, max_size=2))
        parts += [part for part in noise if not part.startswith("@")]
        name, prefix = draw(NAME), draw(st.sampled_from(["", "async "]))
        if draw(st.booleans()):
            parts.append(f"{prefix}def {name}(a, b=')'):\n    pass")
        else:
            indent = draw(st.sampled_from(["  ", "    ", "\t"]))
            methods = "".join(
                f"{indent}{prefix}def {each}(self):\n{indent}{indent}pass\n"
                for each in draw(st.lists(NAME, min_size=1, max_size=3))
            )
            parts.append(f"class Test{name.title()}:\n{indent}'''def test_doc(self): pass'''\n{methods}")
    return "\n".join(parts) + "\n"


def parsed(text: str) -> list[str]:
    """The same names by Python's parser."""
    found = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            inner = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            found += [f"{node.name}::{each.name}" for each in inner]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            found.append(node.name)
    return list(dict.fromkeys(found))


@settings(max_examples=40)
@given(files())
def test_the_names_are_those_that_the_parser_finds(text: str) -> None:
    assert names_of(text) == parsed(text)


@given(st.text("'\"\\#\n dtesf_():", max_size=300))
def test_any_text_gives_names(text: str) -> None:
    assert all(name.startswith(("test", "Test")) for name in names_of(text))


@pytest.mark.parametrize(
    "text", ['"""\\' * 40_000, "'" * 190_000, '"\\"' * 60_000, "def test" * 20_000, "class T(" * 20_000, "\n" * 190_000]
)
def test_the_time_is_linear(text: str) -> None:
    """A quadratic search takes minutes here, and ends at the limit of the test."""
    assert names_of(text[:200_000]) == []


def test_a_text_that_is_too_long_to_be_graded_has_no_names() -> None:
    assert names_of("def test_a(): pass\n" + "#" * 200_000) == []
