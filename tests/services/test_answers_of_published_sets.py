"""Right and wrong programs in the forms of published sets: methods of class Solution, wrapped results, set-ups."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from nouscoder.config import VerifierSection
from nouscoder.data.importers import contests
from nouscoder.domain.reasoning import CLOSING, opened_by
from nouscoder.domain.submission import AssertTests, CallCase, CallTests, Prelude, Profile, Submission, Tests
from nouscoder.verifier.api.schema import parse_submission
from nouscoder.verifier.grading.extract import text_to_grade
from nouscoder.verifier.grading.grader import local_grader
from nouscoder.verifier.grading.validation import InvalidSubmission

METHODS = ("search", "merge", "shuffle", "sum", "product", "gcd", "count", "bisect", "repeat", "main", "reduce")
ADD = CallTests("add", (CallCase((1, 2), {}, [3]),), wrapped=True)


async def verdicts(tests: Tests, codes: Sequence[str], **rules: object) -> list[str]:
    async with local_grader(VerifierSection()) as grader:
        return [(await grader.grade(Submission(tests, code, **rules))).kind.value for code in codes]  # type: ignore[arg-type]


@pytest.mark.parametrize("profile", [Profile.PROCESS, Profile.LCB])
async def test_a_method_of_class_solution_comes_before_what_star_imports_bring(profile: Profile) -> None:
    async with local_grader(VerifierSection()) as grader:
        for name in METHODS:
            tests = CallTests(name, (CallCase((4, 5), {}, 9),))
            method = f"class Solution:\n    def {name}(self, a, b):\n        return a + b\n"
            helper = f"def {name}(a, b):\n    return 0\n"
            star = "from heapq import *\nfrom itertools import *\n"
            static = method.replace("Solution", "Base").replace("    def", "    @staticmethod\n    def", 1)
            static = static.replace("self, ", "") + "class Solution(Base): pass\n"
            for code in (method, method + star, method + helper, static):
                kind = (await grader.grade(Submission(tests, code, prelude=Prelude.LCB, profile=profile))).kind
                assert kind == "accepted", (name, code)
            wrong = method.replace("a + b", "a - b")
            kind = (await grader.grade(Submission(tests, wrong, prelude=Prelude.LCB, profile=profile))).kind
            assert kind == "wrong_answer", name


async def test_an_attribute_of_the_instance_is_a_method_and_a_star_import_is_none() -> None:
    tests = CallTests("gcd", (CallCase((12, 18), {}, 6),))
    body = "class Solution:\n    def __init__(self):\n        self.gcd = lambda a, b: 6\n"
    other = "class Solution:\n    def solve(self, a, b): return 0\n"
    codes = [body, other, f"{other}def gcd(a, b): return 6\n", "class Solution: gcd = staticmethod(lambda a, b: 6)"]
    found = await verdicts(tests, codes, prelude=Prelude.LCB)
    assert found == ["accepted", "runtime_error", "accepted", "accepted"]


async def test_what_the_prelude_brings_is_no_answer_of_a_program_that_does_not_name_it() -> None:
    """`print("hello")` was accepted where gcd is asked for."""
    tests = CallTests("gcd", (CallCase((12, 18), {}, 6),))
    codes = ["print('hello')", "", "x = lambda: gcd(1, 2)", "from math import gcd", "gcd = math.gcd"]
    codes += ["import math as gcd", "globals()['gcd'] = math.gcd", "exec('def gcd(a, b): return 6')"]
    codes += ["from math import *"]
    found = await verdicts(tests, codes, prelude=Prelude.LCB)
    assert found == [*["runtime_error"] * 3, "accepted", "accepted", "runtime_error", *["accepted"] * 3]


FILE = "from solution import gcd\ndef test_gcd():\n    assert gcd(12, 18) == 6\n"


@pytest.mark.parametrize(
    "tests",
    [
        AssertTests(("assert gcd(12, 18) == 6",)),
        AssertTests(("assert isclose(math.fabs(gcd(12, 18)), 6)",)),
        AssertTests(("check(gcd)",), "def check(asked):\n    assert asked(12, 18) == 6\n"),
        AssertTests(("test_gcd()",), "def test_gcd():\n    assert gcd(12, 18) == 6\n"),
        AssertTests(("Test().test_gcd()",), "class Test:\n    def test_gcd(self):\n        assert gcd(12, 18) == 6\n"),
        AssertTests(("assert gcd(12, 18) == 6",), "from math import gcd\n"),
        AssertTests(("test_gcd",), FILE, "solution"),
        AssertTests(("test_gcd",), FILE.replace("import gcd", "import *"), "solution"),
        AssertTests(("test_gcd",), FILE.replace("from solution ", "").replace(" gcd\n", " solution\n", 1)
                    .replace("assert gcd", "assert solution.gcd"), "solution"),
    ],
)  # fmt: skip
async def test_a_case_that_calls_only_what_the_prelude_brings_accepts_no_program(tests: AssertTests) -> None:
    wrong = ["print('hello')", "", "import math\ndef other(a): return a"]
    right = [
        "from math import gcd",
        "gcd = math.gcd",
        "def gcd(a, b): return reduce(lambda x, y: math.gcd(x, y), (a, b))",
    ]
    found = await verdicts(tests, [*wrong, *right], prelude=Prelude.LCB)
    assert found == ["runtime_error"] * 3 + ["accepted"] * 3


async def test_a_case_may_use_the_prelude_beside_the_program_and_call_it_by_its_text() -> None:
    right = "def count(word): return Counter(word)\nclass Solution:\n    def merge(self, a, b): return a + b\n"
    cases = (
        "assert count('abca') == Counter('abca')",
        "assert Solution().merge(deepcopy([1]), [2]) == [1, 2]",
        "assert eval('count(\"a\")') == Counter('a')",
        "assert getattr(sys.modules['main'], 'count')('a') == Counter('a')",
        "def check(asked):\n    assert asked('a') == Counter('a')\ncheck(count)",
        "assert 1 == 1",
    )
    assert await verdicts(AssertTests(cases), [right], prelude=Prelude.LCB) == ["accepted"]


async def test_no_class_replaces_the_entry_of_a_judge() -> None:
    cheat = "class Solution:\n    def __nouscoder_case__(self, case, token):\n        return [token, True]\n"
    assert await verdicts(AssertTests(("assert f(1) == 2",)), [cheat]) == ["runtime_error"]


async def test_what_a_program_defines_is_not_what_a_judge_uses() -> None:
    """A star import's `compile` made right programs fail, and a program's own `exec` made wrong ones pass."""
    right, wrong = "def f(x): return x + 1\n", "def f(x): return x\n"
    entry = "lambda case, token, *_: [token, True]"
    honest = ("from re import *\n", "def exec(*_): return 0\n", "globals = AssertionError = isinstance = len = None\n")
    cheats = (
        *("def exec(*_): pass\n", "def compile(*_): return 'pass'\n", "def globals(): return {'f': lambda x: 2}\n"),
        *("import builtins\nbuiltins.exec = lambda *_: None\n", f"__nouscoder_case__ = {entry}\n"),
        "import threading\ndef run():\n    while True: globals()['__nouscoder_case__'] = "
        f"{entry}\nthreading.Thread(target=run, daemon=True).start()\n",
    )
    for tests in (
        AssertTests(("assert f(1) == 2",)),
        AssertTests(("test_f",), "from solution import f\ndef test_f():\n    assert f(1) == 2\n", "solution"),
    ):
        found = await verdicts(tests, [code + right for code in honest] + [code + wrong for code in cheats])
        assert found[: len(honest)] == ["accepted"] * len(honest), tests
        assert set(found[len(honest) :]) <= {"wrong_answer", "runtime_error"}, tests


@pytest.mark.parametrize("profile", [Profile.PROCESS, Profile.LCB, Profile.CODE_GEN])
async def test_a_wrapped_result_is_right_with_and_without_its_list(profile: Profile) -> None:
    codes = [f"def add(a, b): return {value}" for value in ("a + b", "[a + b]", "[[a + b]]", "a - b", "[a, b]")]
    found = await verdicts(ADD, codes, profile=profile)
    assert found == ["accepted", "accepted", *["wrong_answer"] * 3]


def test_the_sets_whose_graders_take_both_are_wrapped_and_others_are_not() -> None:
    listed = {"inputs": [[1], [2]], "outputs": [[1], [2, 3]], "fn_name": "f"}
    assert contests.tests_of(listed).wrapped  # type: ignore[union-attr]
    case = {"type": "function_call", "fn_name": "f", "input": [1], "output": [3]}
    assert contests.case_tests([case]).wrapped  # type: ignore[union-attr]
    for shape, wrapped in ((listed, True), ({"inputs": ["1"], "outputs": ["[1]"], "fn_name": "Solution().f"}, False)):
        tests = parse_submission(json.dumps({"code": "x", "tests": shape}).encode()).tests
        assert isinstance(tests, CallTests)
        assert (tests.entry_point, tests.wrapped) == ("f", wrapped)


async def test_the_set_up_of_call_tests_runs_before_the_program() -> None:
    tests = CallTests("f", (CallCase((1,), {}, 3),), "from math import inf\ndef two(x): return x + 2\n")
    assert await verdicts(tests, ["def f(x): return min(inf, two(x))", "def f(x): return x"]) == [
        "accepted",
        "wrong_answer",
    ]
    future = CallTests("f", tests.cases, "from __future__ import annotations\ntwo = 2\n")
    for profile in (Profile.PROCESS, Profile.LCB, Profile.CODE_GEN):
        assert await verdicts(future, ["def f(x): return x + two"], profile=profile) == ["accepted"]
    asserts = AssertTests(("assert f(1) == 3",), future.setup)
    assert await verdicts(asserts, ["def f(x): return x + two"], prelude=Prelude.LCB) == ["accepted"]
    assert await verdicts(future, ["def f(x): return x + two"], prelude=Prelude.LCB) == ["accepted"]
    with pytest.raises(InvalidSubmission, match=r"tests\.setup: is not python"):
        await verdicts(CallTests("f", tests.cases, "def ("), ["def f(x): return 3"])


async def test_a_missing_library_is_no_fault_of_the_program() -> None:
    tests = AssertTests(("assert f() == 1",))
    assert await verdicts(tests, ["def f(): return 1"], libraries=("json",)) == ["accepted"]
    with pytest.raises(InvalidSubmission, match="libraries: candidates here cannot import no_such_library"):
        await verdicts(tests, ["import no_such_library\ndef f(): return 1"], libraries=("json", "no_such_library"))


BLOCK = "```python\nprint(1)\n```"


@pytest.mark.parametrize("tag", CLOSING)
@pytest.mark.parametrize("rest", [f"{BLOCK}\nmore", f"{BLOCK}CLOSE done", f"{BLOCK}CLOSE\n{BLOCK}", f"CLOSE{BLOCK}"])
def test_an_answer_is_the_same_whether_the_prompt_or_the_policy_opened_its_reasoning(tag: str, rest: str) -> None:
    rest = rest.replace("CLOSE", CLOSING[tag])
    tests = AssertTests(("pass",))
    prompt = f"Write it.<|assistant|>{tag}\n"
    of_policy = text_to_grade(Submission(tests, completion=f"{tag}\n{rest}"))
    of_template = text_to_grade(Submission(tests, completion=rest, prompt=prompt))
    assert of_policy == of_template
    assert (of_policy is not None) is rest.endswith("```")


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", "<think>\n"),
        ("<\uff5cAssistant\uff5c><think>\n", "<think>\n"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ""),
        ("<|turn>model\n<|channel>thought\n<channel|>", ""),
        ("Use <think> tags.", ""),
        ("", ""),
    ],
)
def test_the_end_of_a_prompt_tells_whether_it_opens_reasoning(prompt: str, opened: str) -> None:
    assert opened_by(prompt) == opened
