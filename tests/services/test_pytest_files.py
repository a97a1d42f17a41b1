"""Files of tests for pytest: one verdict for each test function, and no verdict that the code decides itself."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from nouscoder.config import SandboxSection
from nouscoder.domain.submission import AssertTests, Submission
from nouscoder.domain.verdict import Verdict
from nouscoder.http_server.memory_budget import MemoryBudget
from nouscoder.rpc.pairs import VERDICT
from nouscoder.v1 import verdict_pb2, verifier_pb2, verifier_pb2_grpc
from nouscoder.verifier.api.schema import parse_submission, parse_tests
from nouscoder.verifier.api.servicer import Servicer
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import SandboxUnavailable, open_sandbox
from nouscoder.verifier.toolchains.libraries import library_folders

FILE = '''
"""def test_in_a_text(): pass"""
import asyncio

import pytest

import solution
from solution import Stack, add


@pytest.fixture
def stack(tmp_path):
    made = Stack()
    yield made
    assert made.items is not None


@pytest.mark.parametrize(("a", "b", "total"), [(1, 2, 3), (2, 2, 4)])
def test_add(a, b, total):
    assert add(a, b) == total


def test_fixtures(tmp_path, capsys, monkeypatch):
    print("printed")
    assert capsys.readouterr().out == "printed\\n"
    (tmp_path / "a").write_text("x")
    monkeypatch.setattr(solution, "add", lambda a, b: 0)
    assert solution.add(1, 1) == 0


class TestStack:
    def setup_method(self):
        self.first = 1

    def test_push(self, stack):
        stack.push(self.first)
        assert stack.items == [1]

    @pytest.mark.parametrize("n", range(3))
    def test_pop(self, stack, n):
        stack.push(n)
        assert stack.pop() == n


def test_raises():
    with pytest.raises(IndexError, match="pop"):
        Stack().pop()


async def test_async():
    await asyncio.sleep(0)
    assert add(0.1, 0.2) == pytest.approx(0.3)
'''
CODE = """
import sys
def add(a, b):
    return a + b
class Stack:
    def __init__(self):
        self.items = []
    def push(self, item):
        self.items.append(item)
    def pop(self):
        return self.items.pop()
if __name__ == "__main__":
    sys.exit("the main guard runs")
"""
NAMES = ["test_add", "test_fixtures", "TestStack::test_push", "TestStack::test_pop", "test_raises", "test_async"]
ADD = "from solution import add\ndef test_add():\n    assert add(1, 2) == 3\n"


@dataclass(frozen=True, slots=True)
class Service:
    """A grader whose candidates can import pytest."""

    grader: Grader

    async def grade(self, code: str, file: str = ADD, cases: Sequence[str] = ()) -> Verdict:
        """The verdict of the code on a file in the form that clients send; every test runs."""
        tests = {"type": "pytest", "file": file, **({"cases": list(cases)} if cases else {})}
        request = {"code": code, "tests": tests, "stop_on_first_failure": False, "limits": {"cpu_time_s": 3.0}}
        return await self.grader.grade(parse_submission(json.dumps(request).encode()))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> AsyncIterator[Service]:
    sandbox = open_sandbox(SandboxSection(slots=2, site_packages=library_folders(["pytest"])))
    await sandbox.start()
    yield Service(Grader(sandbox, VerifierMetrics(CollectorRegistry())))
    await sandbox.close()


def outcomes(verdict: Verdict) -> list[str]:
    """The outcome of each test."""
    return [outcome.outcome.value for outcome in sorted(verdict.tests, key=lambda outcome: outcome.index)]


@pytest.mark.asyncio(loop_scope="module")
async def test_each_test_function_has_a_verdict(service: Service) -> None:
    right = await service.grade(CODE, FILE)
    assert outcomes(right) == ["accepted"] * len(NAMES)
    wrong = await service.grade(CODE.replace("a + b", "4").replace("append(item)", "insert(0, item / 0)"), FILE)
    assert outcomes(wrong) == ["wrong_answer", "accepted", "runtime_error", "runtime_error", "accepted", "wrong_answer"]
    assert wrong.first_failure is not None
    assert (wrong.first_failure.input, "assert 4 == 3" in wrong.first_failure.stderr) == ("test_add", True)


@pytest.mark.asyncio(loop_scope="module")
async def test_what_never_ran_to_its_end_is_not_passed(service: Service) -> None:
    file = (
        "import pytest\nfrom solution import add\n"
        "@pytest.fixture\ndef broken():\n    yield\n    raise OSError\n"
        "@pytest.mark.skip\ndef test_skipped(): pass\n"
        "@pytest.mark.xfail\ndef test_xfail(): assert False\n"
        "def test_fixture(broken): pass\n"
        "def test_value(): return True\n"
        "@pytest.mark.parametrize('n', [])\ndef test_nothing(n): pass\n"
        "def test_did_not_raise():\n    with pytest.raises(ValueError):\n        add(1, 2)\n"
    )
    verdict = await service.grade(CODE, file)
    wrong, broken = "wrong_answer", "runtime_error"
    assert outcomes(verdict) == [wrong, wrong, broken, broken, wrong, wrong]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_program_and_the_file_can_fail_as_a_whole(service: Service) -> None:
    assert (await service.grade("def add(:")).kind.value == "compile_error"
    assert (await service.grade("raise OSError")).kind.value == "runtime_error"
    assert (await service.grade(CODE, ADD.replace("add\n", "no_such_name\n", 1))).kind.value == "runtime_error"
    assert (await service.grade(CODE, "def test_yields():\n    yield\n")).kind.value == "runtime_error"
    with pytest.raises(InvalidSubmission, match=r"tests\.setup: is not python"):
        await service.grade(CODE, "def test_add(:")


FAULTS = {
    "a module that is missing": ("import no_such_module\n" + ADD, "tests.setup: No module named 'no_such_module'"),
    "a name that a module lacks": ("from json import absent\n" + ADD, "tests.setup: cannot import name 'absent' from"),
    "importorskip": (f"import pytest\npytest.importorskip('no_such_module')\n{ADD}", "tests.setup: could not import"),
    "a fixture that is missing": (f"{ADD}def test_b(no_such_fixture): pass\n", "tests.cases[1]: there is no fixture"),
    "a fixture of a method": (
        f"{ADD}class TestB:\n    def test_b(self, absent): pass\n",
        "tests.cases[1]: there is no fixture absent",
    ),
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_of_the_file_is_no_programs(service: Service, name: str) -> None:
    file, said = FAULTS[name]
    with pytest.raises(InvalidSubmission) as refused:
        await service.grade(CODE, file)
    assert str(refused.value).startswith(said)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_case_that_the_file_lacks_is_refused(service: Service) -> None:
    for absent in ("test_absent", "TestStack::test_absent", "TestAbsent::test_add"):
        with pytest.raises(InvalidSubmission) as refused:
            await service.grade(CODE, FILE, ["test_add", absent])
        assert str(refused.value) == f"tests.cases[1]: the file has no {absent}"


# Files that fail in their trial, or look as if they did, and accept a right program.
SOUND = {
    "a value of the program": "import solution\nassert solution.add(1, 2) == 3\ndef test_a(): pass\n",
    "a base class of the program": "import solution\nclass Mine(solution.Stack): pass\ndef test_a(): Mine().push(1)\n",
    "a decorator of the program": "import solution\n@solution.same\ndef test_a(): pass\n",
    "a star import": "from solution import *\nTOTAL = add(1, 2)\ndef test_a():\n    assert TOTAL == 3\n",
    "a module that may be missing": f"try:\n    import no_such_module\nexcept ImportError:\n    pass\n{ADD}",
    "a module that is not used": ADD + "    if add(1, 2) != 3:\n        import no_such_module\n",
    "parameters of the program": (
        "import pytest, solution\n@pytest.mark.parametrize('n', solution.NUMBERS)\ndef test_a(n): assert n\n"
    ),
    "a fixture that is asked for": (
        "import pytest\n@pytest.fixture\ndef made(request): return request.param\n"
        "@pytest.mark.parametrize('made', [1], indirect=True)\ndef test_a(made, request): assert made == 1\n"
    ),
    "unittest": "import unittest\nclass TestA(unittest.TestCase):\n    def test_a(self): self.assertEqual(1, 1)\n",
    "an end without a program": "import os, solution\nif solution.add(1, 2) != 3: os._exit(0)\ndef test_a(): pass\n",
    "no end without a program": "import solution\nwhile solution.add(1, 2) != 3: pass\ndef test_a(): pass\n",
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", SOUND)
async def test_what_only_a_program_can_show_is_left_to_the_program(service: Service, name: str) -> None:
    code = f"{CODE}def same(test): return test\nNUMBERS = [1, 2]\n"
    assert (await service.grade(code, SOUND[name])).kind.value == "accepted"


PATCHES_REPORTS = """
import _pytest.reports, _pytest.runner, _pytest.python, pytest, pluggy
def forge():
    import sys
    for name in ("_pytest.reports", "_pytest.runner", "_pytest.python", "_pytest.main"):
        module = sys.modules[name]
        for each in [each for each in vars(module).values() if isinstance(each, type)]:
            if hasattr(each, "outcome"): each.outcome = "passed"
    real = sys.modules["_pytest.reports"].TestReport.from_item_and_call.__func__
    def passed(cls, item, call):
        call.excinfo = None
        return real(cls, item, call)
    sys.modules["_pytest.reports"].TestReport.from_item_and_call = classmethod(passed)
    sys.modules["_pytest.main"].Session.testsfailed = property(lambda self: 0, lambda self, value: None)
forge()
"""
PLANTED = """class Exits: pass
def main(*a, **k): return 0
def test_add(): pass
def pytest_collection_modifyitems(items): items.clear()
"""
PLANTS = f"""
import os, sys
for name in ("conftest.py", "pytest.py", "pluggy.py", "sitecustomize.py", "test_file.py", "asyncio.py", "_pytest.py"):
    with open(f"/tmp/{{name}}", "w") as file:
        file.write({PLANTED!r})
open("/tmp/pytest.ini", "w").write("[pytest]\\naddopts = --collect-only\\n")
os.environ.update(PYTEST_ADDOPTS="--collect-only", PYTEST_PLUGINS="conftest", PYTHONPATH="/tmp")
sys.path.insert(0, "/tmp")
"""
ATTACKS = {
    "patches pytest before": f"{PATCHES_REPORTS}\ndef add(a, b): return 0",
    "patches pytest in the call": f"{PATCHES_REPORTS}\ndef add(a, b):\n    forge()\n    return 0",
    "patches pytest and raises": f"{PATCHES_REPORTS}\ndef add(a, b):\n    forge()\n    raise OSError",
    "plants files": f"{PLANTS}\ndef add(a, b): return 0",
    "replaces modules": "import sys, types\nfake = types.ModuleType('pytest')\nfake.main = lambda *a, **k: 0\n"
    "fake.Module = object\nfake.hookimpl = lambda **k: lambda f: f\n"
    "sys.modules.update(pytest=fake, _pytest=fake, pluggy=fake)\ndef add(a, b): return 0",
    "replaces the importer": "import sys\nclass Finder:\n    def find_spec(name, path=None, target=None):\n"
    "        if 'pytest' in name: raise SystemExit(0)\nsys.meta_path.insert(0, Finder)\ndef add(a, b): return 0",
    "exits while imported": "import os\nos._exit(0)",
    "exits in the call": "import os\ndef add(a, b): os._exit(0)",
    "exits politely": "import sys\ndef add(a, b): sys.exit(0)",
    "ends the session": "def add(a, b):\n    import pytest\n    pytest.exit('done', returncode=0)",
    "skips": "def add(a, b):\n    import pytest\n    pytest.skip('not now')",
    "fails as expected": "def add(a, b):\n    import pytest\n    pytest.xfail('known')",
    "interrupts": "def add(a, b): raise KeyboardInterrupt",
    "writes a report": "import os\nos.write(3, b'true')\n"
    "def add(a, b):\n    os.write(3, b'[\"\", true]')\n    os._exit(0)",
    "replaces the encoder": "import json\n"
    "json.dumps = lambda value, **k: '[true, true]' if value is False else 'true'\ndef add(a, b): return 0",
    "replaces the entry": "def __nouscoder_case__(*a): return [a[1], True]\ndef add(a, b): return 0",
    "forks": "import os\ndef add(a, b):\n    if os.fork(): os._exit(0)\n    return 0",
    "leaves a thread": "import threading, os\nthreading.Timer(0.3, os._exit, [0]).start()\ndef add(a, b):\n"
    "    import time\n    time.sleep(2)\n    return 0",
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_program_that_attacks_the_verdict_is_not_accepted(service: Service, attack: str) -> None:
    verdict = await service.grade(ATTACKS[attack])
    assert verdict.kind.value in ("wrong_answer", "runtime_error"), verdict


@pytest.mark.asyncio(loop_scope="module")
async def test_files_that_look_like_pytests_own_change_nothing(service: Service) -> None:
    """An honest program, among planted files, is accepted."""
    verdict = await service.grade(f"{PLANTS}\ndef add(a, b): return a + b")
    assert verdict.kind.value == "accepted", verdict.first_failure


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"module": "json"}, "tests.module"),
        ({"module": "pytest"}, "tests.module"),
        ({"module": "a.b"}, "tests.module"),
        ({"cases": ["test_add()"]}, "tests.cases[0]"),
        ({"cases": ["test_add", "a::"]}, "tests.cases[1]"),
        ({"file": "x = 1"}, "tests.cases"),
        ({"file": 5}, "tests.setup"),
        ({"file": None}, "tests.setup"),
        ({"more": 1}, "tests.more"),
    ],
)
def test_what_is_no_test_is_refused(fields: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidSubmission) as refused:
        parse_tests(json.dumps({"type": "pytest", "file": ADD, **fields}).encode())
    assert refused.value.field == field


@pytest.mark.asyncio(loop_scope="module")
async def test_a_typed_file_of_tests_over_grpc_is_one_for_pytest(service: Service) -> None:
    """Without `module` the same cases are statements, which need no pytest."""
    server = grpc.aio.server()
    servicer = Servicer(service.grader, (), MemoryBudget(1 << 30))
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def graded(code: str, module: str, cases: Sequence[str], setup: str = ADD) -> Verdict:
        asserts = verdict_pb2.AssertTests(cases=cases, setup=setup, module=module)
        submission = verdict_pb2.Submission(code=code, tests=verdict_pb2.Tests(asserts=asserts), language="python")
        answer = await stub.Grade(verifier_pb2.GradeRequest(submission=submission), timeout=120)
        return VERDICT.of(answer.verdict)

    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: verifier_pb2_grpc.VerifierServiceAsyncStub = verifier_pb2_grpc.VerifierServiceStub(channel)
            assert (await graded(CODE, "solution", ["test_add"])).kind.value == "accepted"
            wrong = await graded(CODE.replace("a + b", "a - b"), "solution", ["test_add"])
            assert wrong.kind.value == "wrong_answer"
            assert wrong.first_failure is not None
            assert "assert -1 == 3" in wrong.first_failure.stderr
            assert (
                await graded("def add(a, b): return a + b", "", ["assert add(1, 2) == 3"], "")
            ).kind.value == "accepted"
            with pytest.raises(grpc.aio.AioRpcError, match=r"tests\.module"):
                await graded(CODE, "a.b", ["test_add"])
    finally:
        await server.stop(0)


@pytest.mark.soak
async def test_each_test_function_has_a_verdict_in_gvisor() -> None:
    try:
        sandbox = open_sandbox(SandboxSection(backend="runsc", slots=1, site_packages=library_folders(["pytest"])))
        await sandbox.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    try:
        in_gvisor = Service(Grader(sandbox, VerifierMetrics(CollectorRegistry())))
        assert outcomes(await in_gvisor.grade(CODE, FILE)) == ["accepted"] * len(NAMES)
        broken = CODE.replace("a + b", "4").replace("append(item)", "insert(0, item / 0)")
        wrong, crash = "wrong_answer", "runtime_error"
        assert outcomes(await in_gvisor.grade(broken, FILE)) == [wrong, "accepted", crash, crash, "accepted", wrong]
        for name in ("patches pytest in the call", "plants files", "exits in the call"):
            assert (await in_gvisor.grade(ATTACKS[name])).kind.value != "accepted", name
    finally:
        await sandbox.close()


async def test_a_service_whose_candidates_have_no_pytest_refuses_the_request() -> None:
    sandbox = open_sandbox(SandboxSection(slots=1))
    await sandbox.start()
    try:
        grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()))
        with pytest.raises(InvalidSubmission, match=r"tests\.module: .*cannot import pytest"):
            await grader.grade(Submission(AssertTests(("test_add",), ADD, "solution"), CODE))
    finally:
        await sandbox.close()
