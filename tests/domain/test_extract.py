"""Extraction of the program from a model's answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.verifier.grading.validation import extract_code


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("```python\nprint(1)\n```", "print(1)"),
        ("```\nprint(1)\n```\n", "print(1)"),
        ("```py\na = 1\nprint(a)\n```\nThat is all.", "a = 1\nprint(a)"),
        ("First:\n```python\nprint(1)\n```\nBetter:\n```python\nprint(2)\n```", "print(2)"),
        ("```python\nprint(1)\n```\nand cut off:\n```python\nprint(2", "print(2"),
        ("```python\nprint(1)", "print(1)"),
        ("~~~python\nprint(1)\n~~~", "print(1)"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''"),
        ("  ```python\n  print(1)\n  ```", "  print(1)"),
        ("```python\r\nprint(1)\r\n```\r\n", "print(1)"),
        ("<think>```python\nprint(0)\n```</think>```python\nprint(1)\n```", "print(1)"),
        ("reasoning\n```python\nprint(0)\n```\n</think>\n```python\nprint(1)\n```", "print(1)"),
        ("<think>a</think>\n```python\nprint('</think>')\n```", "print('</think>')"),
        ("<think>```python\nprint(0)\n```", None),
        ("```python\nprint(0)\n```</think>nothing after it", None),
        ("no code at all", None),
        ("print(1)", None),
        ("inline ```print(1)``` only", None),
        ("```print(1)``` at the start of a line", None),
        ("```python\n```", None),
        ("```python\n   \n```", None),
        ("```", None),
        ("", None),
    ],
)
def test_the_last_fenced_block_after_the_reasoning_is_the_program(completion: str, code: str | None) -> None:
    assert extract_code(completion) == code


@given(st.lists(st.sampled_from(["```", "~~~", "```python", "\n", "x", " ", "<think>", "</think>", "\r"])).map("".join))
def test_a_found_program_is_part_of_the_text_for_any_text(completion: str) -> None:
    code = extract_code(completion)
    assert code is None or (code.strip() and code in completion.replace("\r\n", "\n"))
