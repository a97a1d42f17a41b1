"""What a setup imports by name is a tool of the tests: with it a case may look at what the program has left."""

from __future__ import annotations

import pytest

from nouscoder.config import VerifierSection
from nouscoder.domain.submission import AssertTests, Submission
from nouscoder.verifier.grading.grader import local_grader

IMPORTS = """
from pathlib import Path
from os.path import exists
from os.path import isfile as there
from json import load
from os import getenv
from logging import getLogger
from sqlite3 import connect
from sys import getrecursionlimit
"""
TEST_CASE = """
from unittest import TestCase
class TestCases(TestCase):
    def test_1(self):
        self.assertEqual(open("out").read(), "hi")
"""
WRITES = "open('out', 'w').write('hi')"
# Setup, program, case, verdict.
CASES = {
    "a file by a name": (IMPORTS, WRITES, "assert exists('out')", "accepted"),
    "no file": (IMPORTS, "x = 1", "assert exists('out')", "wrong_answer"),
    "an alias": (IMPORTS, WRITES, "assert there('out')", "accepted"),
    "a path": (IMPORTS, WRITES, "assert Path('out').read_text() == 'hi'", "accepted"),
    "a function of a module": ("import os", WRITES, "assert os.path.exists('out')", "accepted"),
    "JSON": (IMPORTS, "open('out', 'w').write('[1]')", "assert load(open('out')) == [1]", "accepted"),
    "the environment": (IMPORTS, "import os\nos.environ['A'] = 'b'", "assert getenv('A') == 'b'", "accepted"),
    "a logger": (IMPORTS, "import logging\nlogging.root.setLevel(7)", "assert getLogger().level == 7", "accepted"),
    "a database": (
        IMPORTS,
        "import sqlite3\nsqlite3.connect('d').execute('create table t (a)')",
        "assert connect('d').execute('select * from t').fetchall() == []",
        "accepted",
    ),
    "the interpreter": (
        IMPORTS,
        "import sys\nsys.setrecursionlimit(5000)",
        "assert getrecursionlimit() == 5000",
        "accepted",
    ),
    "a setup from the future": (
        "from __future__ import annotations\nfrom os.path import exists",
        WRITES,
        "assert exists('out')",
        "accepted",
    ),
    "an import that may fail": (
        "try:\n    from os.path import exists\nexcept ImportError:\n    pass",
        WRITES,
        "assert exists('out')",
        "accepted",
    ),
    "a class of unittest": (TEST_CASE, WRITES, "TestCases('test_1').debug()", "accepted"),
    "a table that the program changes": (
        "from numpy.testing import assert_array_equal\nimport numpy as np\na = np.array([3, 1])",
        "a.sort()",
        "assert_array_equal(a, [1, 3])",
        "accepted",
    ),
    "what only computes": ("from math import gcd", "x = 1", "assert gcd(4, 6) == 2", "runtime_error"),
    "what came with a star": ("from math import *", "x = 1", "assert gcd(4, 6) == 2", "runtime_error"),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_case_may_use_only_what_its_setup_imports_by_name(name: str) -> None:
    setup, code, case, verdict = CASES[name]
    async with local_grader(VerifierSection()) as grader:
        found = await grader.grade(Submission(AssertTests((case,), setup), code=code))
    assert found.kind == verdict, found
