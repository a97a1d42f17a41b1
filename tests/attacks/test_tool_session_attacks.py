"""Attacks through a tool session: the corpus' attempts to escape, forks, daemons, floods and memory.

Each attack leaves no process, takes its own limits only, and an honest session and submission after it are served.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry
from tests.attack_corpus import Attack

from nouscoder.config import SandboxSection, ToolSessionsSection, VerifierSection
from nouscoder.domain.conversation import CallEnd
from nouscoder.domain.submission import Limits, StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import SandboxUnavailable
from nouscoder.verifier.sandbox.local import LocalSandbox
from nouscoder.verifier.tools.sessions import InterpreterLimits, SandboxInterpreter

pytestmark = pytest.mark.asyncio(loop_scope="module")
WITH_TOOLS = VerifierSection(tools=ToolSessionsSection(sessions=1))
LIMITS = InterpreterLimits(call_s=120.0, life_s=600.0, memory_bytes=256 << 20)
SHORT = InterpreterLimits(call_s=1.0, life_s=600.0, memory_bytes=256 << 20)
CASE = StdinCase("41\n", "42")
CANARY = Submission(StdinTests((CASE,)), "print(int(input()) + 1)", limits=Limits(60.0, 60.0))

FORK_BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
FLOOD = "import os\nwhile True: os.write(1, b'x' * 65536)\n"
FLOOD_AFTER_THE_END = """import os, sys
frame = sys._getframe()
while 'mark' not in frame.f_locals: frame = frame.f_back
mark = frame.f_locals['mark']
if os.fork() == 0:
    os.setsid()
    while True: os.write(1, b'x' * 4096)
os.write(1, mark)
"""
SOCKETS = """import socket
kept = []
while True:
    one, other = socket.socketpair()
    kept += [one, other]
    one.setblocking(False)
    try:
        while True: one.send(b'x' * 65536)
    except OSError: pass
"""
BUSY_DAEMONS = """import os, signal, threading
for number in range(1, 64):
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): pass
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        threading.Thread(target=lambda: [0 for _ in iter(int, 1)], daemon=True).start()
        while True: pass
print('started')
"""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox() -> AsyncIterator[LocalSandbox]:
    made = LocalSandbox(SandboxSection(slots=1), tool_slots=1)
    try:
        await made.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield made
    await made.close()


async def call(sandbox: LocalSandbox, code: str, limits: InterpreterLimits = LIMITS) -> tuple[CallEnd, str]:
    """The answer to the attack. No process of it is left, and an honest session and submission after it are served."""
    interpreter = SandboxInterpreter(sandbox, limits)
    answer = await interpreter.run(code)
    await interpreter.close()
    await settled(lambda: not programs(sandbox))
    honest = SandboxInterpreter(sandbox, LIMITS)
    assert (await honest.run("import os; sorted(os.listdir('/tmp')), 6 * 7")).output == "(['main.py'], 42)\n"
    await honest.close()
    grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()), WITH_TOOLS)
    assert (await grader.grade(CANARY)).kind is VerdictKind.ACCEPTED
    return answer.end, answer.output


def programs(sandbox: LocalSandbox) -> dict[int, str]:
    """The state letter of each process of candidates. They are the descendants of an init, which a zygote has made."""
    inits = [child for zygote in sandbox.pids() for child in children(zygote)]
    found: dict[int, str] = {}
    todo = [child for init in inits for child in children(init)]
    while todo:
        pid = todo.pop()
        try:
            found[pid] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        todo += children(pid)
    return found


def children(pid: int) -> list[int]:
    """The child processes of all threads of `pid`."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:
        return []


async def settled(condition: Any) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.005)


async def test_the_attempts_of_the_corpus_are_refused(sandbox: LocalSandbox, attacks: Mapping[str, Attack]) -> None:
    """Every attempt that needs no input and no limit of its own, as a cell."""
    plain = {"attempt", "why", "verdict"}
    others = ("control/inherited_descriptors",)  # descriptor 3 is the input, from which the interpreter reads cells
    chosen = [
        attack
        for attack in attacks.values()
        if "attempt" in attack.table and not set(attack.table) - plain and attack.name not in others
    ]
    assert len(chosen) > 20
    for attack in chosen:
        interpreter = SandboxInterpreter(sandbox, LIMITS)
        answer = await interpreter.run(attack.code)
        await interpreter.close()
        assert (answer.end, answer.output) == (CallEnd.DONE, "held\n"), attack.name
    await call(sandbox, "pass")


async def test_a_fork_bomb_ends_with_its_call(sandbox: LocalSandbox) -> None:
    end, _ = await call(sandbox, FORK_BOMB, SHORT)
    assert end is CallEnd.TIME_LIMIT


async def test_a_flood_of_output_ends_at_the_output_limit(sandbox: LocalSandbox) -> None:
    end, output = await call(sandbox, FLOOD)
    assert end is CallEnd.OUTPUT_LIMIT
    assert len(output) < 100_000


async def test_a_flood_after_a_forged_end_is_stopped_between_calls(sandbox: LocalSandbox) -> None:
    interpreter = SandboxInterpreter(sandbox, LIMITS)
    assert (await interpreter.run(FLOOD_AFTER_THE_END)).end in (CallEnd.DONE, CallEnd.OUTPUT_LIMIT)
    await settled(lambda: set(programs(sandbox).values()) <= {"T", "Z"})
    await interpreter.close()
    await call(sandbox, "pass")


async def test_memory_outside_the_heap_ends_the_interpreter_and_not_the_service(sandbox: LocalSandbox) -> None:
    end, output = await call(sandbox, SOCKETS)
    assert end in (CallEnd.MEMORY_LIMIT, CallEnd.EXITED) or "OSError" in output, output


async def test_nothing_runs_between_two_calls_whatever_the_code_has_started(sandbox: LocalSandbox) -> None:
    interpreter = SandboxInterpreter(sandbox, LIMITS)
    assert (await interpreter.run(BUSY_DAEMONS)).output == "started\n"
    await settled(lambda: len(programs(sandbox)) == 4 and set(programs(sandbox).values()) == {"T"})
    assert (await interpreter.run("6 * 7")).output == "42\n"
    await settled(lambda: set(programs(sandbox).values()) == {"T"})
    await interpreter.close()
    await settled(lambda: not programs(sandbox))


async def test_a_session_sees_nothing_of_another_one_nor_of_a_submission(sandbox: LocalSandbox) -> None:
    secret = SandboxInterpreter(sandbox, LIMITS)
    await secret.run("import os; open('/tmp/secret', 'w').write('x'); os.environ['SECRET'] = 'x'")
    grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()), WITH_TOOLS)
    look = "import os; print(sorted(os.listdir('/tmp')), os.environ.get('SECRET'), len(os.listdir('/proc')))"
    case = StdinCase("", "['main.py'] None")
    verdict = await grader.grade(Submission(StdinTests((case,)), look.replace(", len(os.listdir('/proc'))", "")))
    assert verdict.kind is VerdictKind.ACCEPTED
    await secret.close()
    end, output = await call(sandbox, look.replace(", len(os.listdir('/proc'))", ""))
    assert (end, output) == (CallEnd.DONE, "['main.py'] None\n")
