"""Programs that attack what judges them: a checker after them, an interactor beside them, a runner around them.

A checker or an interactor is in another sandbox, so nobody stops it, reads its files, or leaves it a pipe. In each
backend all programs use one slot in turn, and an honest one after them is accepted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

import pytest
import pytest_asyncio
from tests.isolated_graders import grader_on, isolated

from nouscoder.data.importers.mathematics import read_reasoning
from nouscoder.domain.submission import CheckerTests, InteractiveTests, JudgeProgram, Limits, StdinCase, Submission
from nouscoder.verifier.grading.grader import Grader

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
    pytest.mark.parametrize("grader", isolated(), indirect=True, scope="module"),
    pytest.mark.alone,
]
LIMITS = Limits(wall_time_s=6.0, cpu_time_s=6.0, memory_bytes=256 << 20, processes=32)
CASES = (StdinCase("what is it?\n", "the-needle"),)
CHECKER = JudgeProgram("import sys\nsys.exit(open(sys.argv[2]).read().strip() != open(sys.argv[3]).read())", "python")
CHECKED = Submission(CheckerTests(CASES, CHECKER), "", limits=LIMITS)
INTERACTOR = JudgeProgram(
    "import sys\nprint(open(sys.argv[1]).read().strip(), flush=True)\n"
    "sys.exit(sys.stdin.readline().strip() != open(sys.argv[3]).read())",
    "python",
)
ASKED = replace(CHECKED, tests=InteractiveTests(CASES, INTERACTOR))
RIGHT = "print('the-nee' + 'dle')"
_FIND = """
import os, sys
word, found = b'the-nee' + b'dle', 'nothing'
for place in ('/tmp', '/dev', '/program', '/proc'):
    for at, folders, names in os.walk(place):
        for name in names:
            try:
                file = os.open(at + '/' + name, os.O_RDONLY | os.O_NONBLOCK)
                if word in os.read(file, 1 << 16): found = word.decode()
                os.close(file)
            except OSError: pass
for pid in os.listdir('/proc'):
    for name in ('cwd/answer', 'root/tmp/answer', 'root/program/source/answer', 'fd/0'):
        try: found = open(f'/proc/{pid}/{name}').read() if pid.isdigit() and pid != str(os.getpid()) else found
        except OSError: pass
"""
_PIPES = """
import os
for name in ('input', 'output', 'answer', 'main.py', '/tmp/answer', '/tmp/output', '/dev/shm/answer'):
    try: os.unlink(name)
    except OSError: pass
    try: os.mkfifo(name, 0o666)
    except OSError: pass
"""
_STOP = """
import os, signal
for pid in (os.getppid(), 1, -1, *map(int, filter(str.isdigit, os.listdir('/proc')))):
    if pid != os.getpid():
        for number in (signal.SIGSTOP, signal.SIGKILL):
            try: os.kill(pid, number)
            except OSError: pass
"""
_STAY = """
import os, time
if not os.fork():
    os.setsid()
    while True:
        for name in ('output', 'answer', '/tmp/output', '/tmp/answer'):
            try: open(name, 'w').write('the-nee' + 'dle')
            except OSError: pass
        if not os.fork(): os._exit(0)
"""
_SAY = "print('wrong', flush=True)"
ATTACKS = {
    "stops everything": _STOP + _SAY,
    "pipes for its files": _PIPES + _SAY,
    "looks for its files": _FIND + "print(found, flush=True)",
    "looks for its files, in a child that stays": f"{_SAY}\nimport os\nif os.fork() == 0:{_FIND}".replace(
        _FIND, "".join(f"    {line}\n" for line in _FIND.splitlines())
    ),
    "writes its files": _STAY + _SAY,
    "streams of others": "import os\nfor n in range(3, 512):\n    try: os.write(n, b'the-nee' + b'dle')\n"
    "    except OSError: pass\n" + _SAY,
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def grader(request: pytest.FixtureRequest) -> AsyncIterator[Grader]:
    """A grader with the backend that a test names."""
    async with grader_on(request, request.param) as made:
        yield made


async def check(grader: Grader, form: Submission, programs: Mapping[str, str], right: str) -> None:
    """Each program is wrong, or at most makes its own runner wait, and the right one after all of them is accepted."""
    kinds = {}
    for name, code in {**programs, "right": right}.items():
        kinds[name] = (await grader.grade(replace(form, code=code))).kind.value
    assert kinds.pop("right") == "accepted"
    waits = {"time_limit_exceeded"} if form.language == "bash" else set()
    assert {name: kind for name, kind in kinds.items() if kind not in {"wrong_answer"} | waits} == {}


async def test_nobody_reaches_a_checker(grader: Grader) -> None:
    await check(grader, CHECKED, ATTACKS, RIGHT)


async def test_nobody_reaches_the_answer_of_a_reasoning_task(grader: Grader) -> None:
    """R1-Code-Interpreter's tasks: a program reads nothing and prints the answer, which never enters its sandbox."""
    problem = read_reasoning({"question": "What is it?", "answer": "the-needle"}, 1).problem
    asked = problem.grading_rules().submission(problem.tests, "")
    form = replace(asked, code="", completion=None, limits=LIMITS)
    every = "print(*[a + b for a in ('the-', 'the-nee') for b in ('needle', 'dle', 'no')])"
    await check(grader, form, {**ATTACKS, "says all": every}, RIGHT)


async def test_nobody_reaches_an_interactor(grader: Grader) -> None:
    reads = "asked = input()\n"
    await check(grader, ASKED, {name: reads + code for name, code in ATTACKS.items()}, reads + RIGHT)


RUNNER = JudgeProgram(
    "import subprocess, sys\n"
    "said = subprocess.run(['bash', sys.argv[1]], capture_output=True, text=True).stdout\n"
    "open('kept', 'w').write(said)\nimport os\nos.rename('kept', sys.argv[2])",
    "python",
)
RUN_CHECKER = JudgeProgram(
    "import sys\nwanted = open(sys.argv[1]).read().strip()\nsys.exit(open(sys.argv[2]).read().strip() != wanted)",
    "python",
)
RUN_CASE = StdinCase("the-needle", "echo the-needle")
RUN = Submission(
    CheckerTests((RUN_CASE,), RUN_CHECKER, of_code=True, runner=RUNNER), "", language="bash", limits=LIMITS
)
AROUND = {
    "stops its runner": "kill -STOP $PPID",
    "stops its runner, and leaves": "(sleep 0.1; kill -STOP $PPID) & kill -STOP $PPID; echo wrong",
    "kills its runner": "kill -9 $PPID",
    "a pipe in place of what it makes": "(while :; do rm -f output kept; mkfifo output kept; done) & sleep 0.3; echo x",
    "a pipe beside a dead runner": "mkfifo output; kill -9 $PPID",
    "a folder in place of what it makes": "mkdir output; echo x",
    "a link to the system": "ln -s /etc/passwd kept; echo x; chmod 555 .",
    "a link to its text": "ln -s code output; ln -s code kept; echo x",
    "looks for the checker": "cat /proc/*/cmdline /proc/*/environ /proc/*/cwd/* /tmp/* 2>/dev/null < /dev/null"
    " | tr '\\0' '\\n' | grep -ao 'the-nee[d]le' | head -1",
    "a process that stays": "(setsid bash -c 'while :; do echo the-nee''dle > input; cp code answer; done' &) ; echo x",
}
CHECKS_ITSELF = JudgeProgram(
    "import subprocess, sys\n"
    "said = subprocess.run(['bash', sys.argv[2]], capture_output=True, text=True).stdout\n"
    "sys.exit(said.strip() != 'the-needle')",
    "python",
)


async def test_nobody_gets_by_a_runner(grader: Grader) -> None:
    await check(grader, RUN, AROUND, "echo the-needle")


async def test_a_program_beside_its_checker_of_code_can_stop_it_and_gains_nothing(grader: Grader) -> None:
    form = replace(RUN, tests=CheckerTests((RUN_CASE,), CHECKS_ITSELF, of_code=True))
    beside = {
        "stops its checker": "kill -STOP $PPID",
        "stops its checker, and is stopped": "kill -STOP -1; kill -STOP $$",
    }
    await check(
        grader, form, beside | {"kills it": "kill -9 $PPID", "a pipe": "rm output; mkfifo output"}, "echo the-needle"
    )
