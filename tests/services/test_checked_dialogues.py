"""A checker after an interactor: it judges the file that the interactor has written (testlib's `tout`).

The contract of the three sandboxes in every backend is in tests/contract/test_sandbox_contract.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from nouscoder.config import SandboxSection
from nouscoder.domain.submission import (
    CheckerTests,
    InteractiveTests,
    JudgeProgram,
    JudgeProtocol,
    Limits,
    StdinCase,
    Submission,
)
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.rpc import pairs
from nouscoder.v1 import verdict_pb2
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import Exit, RunResult, SandboxUnavailable, open_sandbox
from nouscoder.verifier.sandbox.fake import Behaviour, FakeSandbox, ended
from nouscoder.verifier.sandbox.local import LocalSandbox
from nouscoder.verifier.toolchains.languages import installed

pytestmark = pytest.mark.asyncio(loop_scope="module")
CASES = (StdinCase("given", "the-answer"),)
INTERACTOR, CHECKER = JudgeProgram("interactor = 1", "python"), JudgeProgram("checker = 1", "python")
CRASHED = ended(exit=Exit.SIGNALLED, signal=11)


async def faked(
    interactor: RunResult, checks: list[RunResult], candidate: RunResult | None = None, checker: JudgeProgram = CHECKER
) -> tuple[Verdict, FakeSandbox]:
    """The verdict, with these results of the programs; `checks` are those of the checker, in order."""
    left = list(checks)
    table: dict[str, Behaviour] = {
        "candidate = 1": lambda _: candidate or ended(b"said"),
        INTERACTOR.code: lambda _: interactor,
        checker.code: lambda _: left.pop(0),
    }
    sandbox = FakeSandbox(table)
    await sandbox.start()
    grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()))
    verdict = await grader.grade(Submission(InteractiveTests(CASES, INTERACTOR, checker=checker), "candidate = 1"))
    assert left == []
    return verdict, sandbox


async def test_the_checker_gets_what_the_interactor_wrote_with_input_and_answer() -> None:
    verdict, sandbox = await faked(ended(result=b"written"), [ended()])
    assert verdict.kind is VerdictKind.ACCEPTED
    candidate, interactor, checker = sandbox.inputs
    assert (candidate.args, dict(candidate.files)) == ((), {})
    assert (interactor.args, dict(interactor.files)) == (
        ("input", "output", "answer"),
        {"input": b"given", "answer": b"the-answer"},
    )
    assert checker.args == ("input", "output", "answer")
    assert dict(checker.files) == {"input": b"given", "output": b"written", "answer": b"the-answer"}


async def test_a_checker_of_kattis_gets_it_as_stdin() -> None:
    kattis = replace(CHECKER, protocol=JudgeProtocol.KATTIS)
    verdict, sandbox = await faked(ended(result=b"written"), [ended(exit_code=43)], checker=kattis)
    assert verdict.kind is VerdictKind.WRONG_ANSWER
    assert (sandbox.inputs[2].stdin, sandbox.inputs[2].args) == (b"written", ("input", "answer", "./"))


@pytest.mark.parametrize(
    ("check", "kind", "score"),
    [
        (ended(exit_code=1, stderr=b"not so"), VerdictKind.WRONG_ANSWER, 0.0),
        (ended(exit_code=7, stderr=b"points 0.25"), VerdictKind.WRONG_ANSWER, 0.25),
        (ended(exit_code=3), VerdictKind.INTERNAL_ERROR, 0.0),
    ],
)
async def test_the_checker_decides(check: RunResult, kind: VerdictKind, score: float) -> None:
    verdict, _ = await faked(ended(), [check])  # the interactor wrote nothing
    assert (verdict.kind, verdict.score) == (kind, score)


@pytest.mark.parametrize(
    ("interactor", "candidate", "kind"),
    [
        (ended(exit_code=1), None, VerdictKind.WRONG_ANSWER),
        (ended(exit_code=7, stderr=b"0.5"), None, VerdictKind.WRONG_ANSWER),
        (ended(exit_code=3), None, VerdictKind.INTERNAL_ERROR),
        (ended(), ended(exit_code=1), VerdictKind.RUNTIME_ERROR),
        (ended(), ended(exit=Exit.TIME_LIMIT), VerdictKind.TIME_LIMIT_EXCEEDED),
    ],
)
async def test_the_checker_does_not_run_unless_the_interactor_accepts(
    interactor: RunResult, candidate: RunResult | None, kind: VerdictKind
) -> None:
    verdict, sandbox = await faked(interactor, [], candidate)
    assert (verdict.kind, sandbox.num_runs) == (kind, 2)


@pytest.mark.parametrize(
    ("checks", "kind"),
    [
        ([CRASHED, ended()], VerdictKind.WRONG_ANSWER),
        ([CRASHED, CRASHED], VerdictKind.INTERNAL_ERROR),
        # An uncaught exception: the answer file has another form, so a second one proves nothing against the checker.
        ([ended(exit_code=1, stderr=b"Traceback (most recent call last):")] * 2, VerdictKind.WRONG_ANSWER),
    ],
)
async def test_a_candidate_cannot_crash_the_checker_by_what_the_interactor_writes(
    checks: list[RunResult], kind: VerdictKind
) -> None:
    assert (await faked(ended(result=b"?"), checks))[0].kind is kind


async def test_a_checker_in_an_unknown_language_is_refused() -> None:
    with pytest.raises(InvalidSubmission, match=r"tests\.checker\.language"):
        await faked(ended(), [], checker=JudgeProgram("x", "cobol"))


async def test_grpc_clients_can_send_the_fields() -> None:
    judge = verdict_pb2.JudgeProgram(code="x", language="c", protocol="kattis")
    fields = verdict_pb2.InteractiveTests(
        cases=[verdict_pb2.StdinCase(input="1")], interactor=verdict_pb2.JudgeProgram(code="y"), checker=judge
    )
    assert pairs.tests_from(verdict_pb2.Tests(interactive=fields)) == InteractiveTests(
        (StdinCase("1", ""),), JudgeProgram("y"), checker=JudgeProgram("x", "c", JudgeProtocol.KATTIS)
    )


# As with testlib: the interactor answers questions, and writes the guess and the number of questions to `tout`.
ASKED = """#include <fstream>
#include <iostream>
int main(int, char **v) {
  std::ifstream in(v[1]); std::ofstream tout(v[2]); long n, x, asked = 0; in >> n;
  for (char kind; std::cin >> kind >> x; ) {
    if (kind == '!') { tout << x << ' ' << asked << std::endl; return 0; }
    asked++; std::cout << (x <= n) << std::endl;
  }
  return 2;
}"""
# Right is the number, after at most as many questions as the answer file allows; half a point with more questions.
COUNTED = """#include <cstdio>
#include <fstream>
int main(int, char **v) {
  std::ifstream in(v[1]), out(v[2]), answer(v[3]); long n, most, x, asked; in >> n; answer >> most;
  if (!(out >> x >> asked)) return 3;
  if (x == n && asked > most) { std::fprintf(stderr, "points 0.5"); return 7; }
  return x != n;
}"""
COUNTED_IN_PYTHON = """import sys
n, most = (int(open(name).read()) for name in sys.argv[1:3])
x, asked = map(int, input().split())
sys.exit(42 if x == n and asked <= most else 43)
"""
SEARCH = """low, high = 0, 1 << 20
while high - low > 1:
    middle = (low + high) // 2
    print("?", middle, flush=True)
    low, high = (middle, high) if input() == "1" else (low, middle)
print("!", low)
"""
SLOW = SEARCH.replace("while", 'for _ in range(9):\n    print("?", 0, flush=True); input()\nwhile')
TWENTY = (StdinCase("77", "20"), StdinCase("0", "20"), StdinCase("1048575", "20"))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox() -> AsyncIterator[LocalSandbox]:
    made = open_sandbox(SandboxSection(slots=1))
    try:
        await made.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    assert isinstance(made, LocalSandbox)
    yield made
    await made.close()


@pytest.mark.parametrize("kattis", [False, True])
async def test_programs_are_judged_by_what_the_interactor_saw(sandbox: LocalSandbox, kattis: bool) -> None:
    if "cpp" not in installed():
        pytest.skip("cpp is not installed")
    checker = JudgeProgram(COUNTED_IN_PYTHON, "python", JudgeProtocol.KATTIS) if kattis else JudgeProgram(COUNTED)
    tests = InteractiveTests(TWENTY, JudgeProgram(ASKED), checker=checker)
    grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()))
    limits = Limits(wall_time_s=60, cpu_time_s=60)
    kinds = {}
    for name, code in (("right", SEARCH), ("slow", SLOW), ("wrong", "print('!', 5)"), ("silent", "pass")):
        verdict = await grader.grade(Submission(tests, code, limits=limits, stop_on_first_failure=False))
        kinds[name] = (verdict.kind, verdict.score)
    wrong = (VerdictKind.WRONG_ANSWER, 0.0)
    assert kinds == {
        "right": (VerdictKind.ACCEPTED, 1.0),
        "slow": (VerdictKind.WRONG_ANSWER, 0.0 if kattis else 0.5),
        "wrong": wrong,
        "silent": wrong,
    }


HOSTILE = {
    "a pipe": "os.mkfifo('output')",
    "a folder": "os.mkdir('output')",
    "a link to itself": "os.symlink('output', 'output')",
    "a link to the answer": "os.symlink('answer', 'output')",
    "nobody may read it": "open('output', 'w').write('5 0'); os.chmod('output', 0)",
    "a hole": "f = open('output', 'w'); f.truncate(60 << 20)",
    "too large": "f = open('output', 'w')\ntry:\n    while True: f.write('x' * 65536)\nexcept OSError: pass",
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_what_is_at_the_place_of_the_file_breaks_nothing(sandbox: LocalSandbox, name: str) -> None:
    """The interactor's program is of a client too."""
    interactor = JudgeProgram(f"import os\n{HOSTILE[name]}\nimport sys; sys.stdin.read()", "python")
    checker = JudgeProgram("import sys; sys.exit(open('output').read(3) != '5 0')", "python")
    tests = InteractiveTests((StdinCase("5", "answer"),) * 2, interactor, checker=checker)
    grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()))
    for _ in range(2):
        verdict = await grader.grade(Submission(tests, "print(1)", stop_on_first_failure=False))
        expected = VerdictKind.ACCEPTED if name == "nobody may read it" else VerdictKind.WRONG_ANSWER
        assert (verdict.kind, verdict.graded) == (expected, 2), verdict


NEXT_PASS = "import sys\nopen(sys.argv[3] + '/nextpass.in', 'w').write('2')\nsys.exit(42)\n"


async def test_a_checker_that_asks_for_another_pass_accepts_nothing(sandbox: LocalSandbox) -> None:
    grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()))
    tests = CheckerTests(CASES, JudgeProgram(NEXT_PASS, "python", JudgeProtocol.KATTIS))
    verdict = await grader.grade(Submission(tests, "print(1)"))
    assert (verdict.kind, "another pass" in verdict.detail) == (VerdictKind.INTERNAL_ERROR, True)
    once = CheckerTests(CASES, JudgeProgram("import sys\nsys.exit(42)\n", "python", JudgeProtocol.KATTIS))
    assert (await grader.grade(Submission(once, "print(1)"))).kind is VerdictKind.ACCEPTED


READS = JudgeProgram("raise SystemExit(int(input()) != 42)\n", "python")
AT_START = JudgeProgram("raise ValueError\n", "python")


@pytest.mark.parametrize(
    ("interactor", "code", "kind"),
    [
        (READS, "import os, time\nos.close(1)\ntime.sleep(9)", VerdictKind.WRONG_ANSWER),
        (READS, "import os\nos.close(1)\nos.read(0, 1)\nraise SystemExit(3)", VerdictKind.WRONG_ANSWER),
        (READS, "pass", VerdictKind.WRONG_ANSWER),
        (READS, "print('x', flush=True)\ninput()", VerdictKind.WRONG_ANSWER),
        (AT_START, "print(1, flush=True)\ninput()", VerdictKind.INTERNAL_ERROR),
        (AT_START, "import sys\nprint(len(sys.stdin.read()))", VerdictKind.INTERNAL_ERROR),
    ],
)
async def test_whose_fault_the_crash_of_an_interactor_is(
    sandbox: LocalSandbox, interactor: JudgeProgram, code: str, kind: VerdictKind
) -> None:
    """The program closed its output or said what it cannot read; or it failed by itself."""
    grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()))
    limits = Limits(wall_time_s=1, cpu_time_s=1)
    verdict = await grader.grade(Submission(InteractiveTests(CASES, interactor), code, limits=limits))
    assert verdict.kind is kind, verdict


UNHEARD = {
    "python": "import select\none = select.poll()\none.register(0, 0)\none.poll()\nraise ValueError('unheard')\n",
    "cpp": "#include <poll.h>\n#include <stdexcept>\nint main() { pollfd one{0, 0, 0}; poll(&one, 1, -1);"
    ' throw std::runtime_error("unheard"); }\n',
    "java": "public class Main { public static void main(String[] a) throws Exception {"
    ' while (System.in.available() == 0) Thread.sleep(1); throw new IllegalStateException("unheard"); } }\n',
}


@pytest.mark.parametrize("language", UNHEARD)
async def test_an_interactor_that_crashes_without_reading_what_a_program_left_is_at_fault(
    sandbox: LocalSandbox, language: str
) -> None:
    """The program reads nothing, says a word and ends. The interactor waits for that and crashes by itself."""
    if language not in installed():
        pytest.skip(f"{language} is not installed")
    grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()))
    tests = InteractiveTests(CASES, JudgeProgram(UNHEARD[language], language))
    verdict = await grader.grade(Submission(tests, "print(1)", limits=Limits(wall_time_s=5, cpu_time_s=5)))
    assert (verdict.kind, "unheard" in verdict.detail) == (VerdictKind.INTERNAL_ERROR, True), verdict
