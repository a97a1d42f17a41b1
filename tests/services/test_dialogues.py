"""Dialogues in the `local` backend, where pipes between the two inits connect the programs: rounds, waits, ends,
attacks on the pipes. The contract of dialogues in every backend is in tests/contract/test_sandbox_contract.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry
from tests.busy_cpu import HOG

from nouscoder.config import SandboxSection
from nouscoder.domain.submission import InteractiveTests, JudgeProgram, Limits, StdinCase, Submission
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.harness import frames
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import (
    Exit,
    Program,
    RunResult,
    SandboxError,
    SandboxUnavailable,
    open_sandbox,
)
from nouscoder.verifier.sandbox.local import LocalSandbox
from nouscoder.verifier.toolchains.languages import installed, registry

pytestmark = pytest.mark.asyncio(loop_scope="module")
PYTHON = registry()["python"]
SHORT = Limits(wall_time_s=1.5, cpu_time_s=30, memory_bytes=256 << 20, output_bytes=8 << 20, processes=16)
WIDE = replace(SHORT, wall_time_s=60.0, cpu_time_s=60.0)
LONGER = replace(SHORT, wall_time_s=31.5)  # of a partner
LATEST = replace(WIDE, wall_time_s=90.0)
MIB = 1 << 20


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


async def talk(
    sandbox: LocalSandbox, one: str, other: str, limits: Limits = WIDE, others: Limits = WIDE, times: int = 1
) -> tuple[RunResult, RunResult]:
    """The results of the last of `times` dialogues of the same pair."""
    async with sandbox.with_partners(Program(PYTHON, one, limits), Program(PYTHON, other, others)) as (first, second):
        for _ in range(times):
            results = await first.dialogue_with(second)
    return results


ASKS = """import sys
for n in range({rounds}):
    sys.stdout.write(f"{{n}}\\n"); sys.stdout.flush()
    if sys.stdin.readline() != f"{{n + 1}}\\n": raise SystemExit("wrong")
"""
ANSWERS = """import sys
for line in sys.stdin:
    sys.stdout.write(f"{int(line) + 1}\\n"); sys.stdout.flush()
"""


async def test_no_byte_of_a_conversation_passes_through_the_gateway(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = []
    receive = type(sandbox._slots[0]).receive

    async def recorded(slot: object, limit_s: float) -> tuple[object, bytes]:
        kind, payload = await receive(slot, limit_s)  # type: ignore[arg-type]
        kinds.append(kind.name)
        return kind, payload

    monkeypatch.setattr(type(sandbox._slots[0]), "receive", recorded)
    asks, answers = await talk(sandbox, ASKS.format(rounds=500), ANSWERS)
    assert (asks.exit, asks.exit_code, answers.exit_code) == (Exit.EXITED, 0, 0), asks.stderr
    assert asks.stdout == b"".join(b"%d\n" % n for n in range(500))
    assert answers.stdout == b"".join(b"%d\n" % n for n in range(1, 501))
    assert set(kinds) <= {"HELLO", "READY", "COMPILED", "RESULT"}


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_a_hundred_thousand_rounds_pass(sandbox: LocalSandbox) -> None:
    limits = replace(WIDE, wall_time_s=10.0)
    for rounds in (10_000, 100_000):
        begun_s = time.monotonic()
        asks, _ = await talk(sandbox, ASKS.format(rounds=rounds), ANSWERS, limits, replace(limits, wall_time_s=300.0))
        each_us = (time.monotonic() - begun_s) / rounds * 1e6
        print(f"{rounds} rounds: {each_us:.1f} us each; counted {asks.wall_time_s:.2f} s, CPU {asks.cpu_time_s:.2f} s")
        assert (asks.exit, asks.exit_code) == (Exit.EXITED, 0), asks


SLOW = """import sys, time
for line in sys.stdin:
    {work}
    print(int(line) + 1, flush=True)
"""
SLEEPS = "time.sleep(0.75)"
SPINS = "end = time.process_time() + 3\n    while time.process_time() < end: pass"


@pytest.mark.parametrize(("work", "rounds"), [(SLEEPS, 4), (SPINS, 1)])
async def test_the_wait_for_an_answer_is_not_the_programs_wall_time(
    sandbox: LocalSandbox, work: str, rounds: int
) -> None:
    asks, _ = await talk(sandbox, ASKS.format(rounds=rounds), SLOW.format(work=work), SHORT, LONGER)
    assert (asks.exit, asks.exit_code) == (Exit.EXITED, 0), asks
    assert asks.wall_time_s < 1.5


async def test_a_program_that_waits_for_an_answer_that_does_not_come_exceeds_its_own_limit(
    sandbox: LocalSandbox,
) -> None:
    """It does not get the time of its partner, who waits as well."""
    waits, _ = await talk(sandbox, "print(1, flush=True); input()", "input(); input()", SHORT, LONGER)
    assert waits.exit is Exit.TIME_LIMIT
    assert 1.4 < waits.wall_time_s < 15


async def test_the_free_wait_is_bounded(sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the given time. That is usually what the partner's limit exceeds the program's own by, so that both limits end
    at once; here the partner has more time, so that only the program can exceed its limit."""
    given, terms = [], frames.pack_terms

    def shorter(nonce: bytes, *, is_host: bool, spare_s: float) -> bytes:
        given.append(spare_s)
        return terms(nonce, is_host=is_host, spare_s=min(spare_s, 0.5))

    monkeypatch.setattr(frames, "pack_terms", shorter)
    asks, _ = await talk(sandbox, ASKS.format(rounds=9), SLOW.format(work=SLEEPS), SHORT, LONGER)
    assert asks.exit is Exit.TIME_LIMIT
    assert given == [LONGER.wall_time_s - SHORT.wall_time_s, 0.0]


@pytest.mark.parametrize(("pause_s", "ended"), [(0.0, True), (30.0, False)])
async def test_a_result_says_whether_the_partner_had_ended_before_the_limit(
    sandbox: LocalSandbox, pause_s: float, ended: bool
) -> None:
    """The second partner ends because the program is killed: it waits for the end of its input."""
    partner = "raise SystemExit(1)" if ended else "import sys; sys.stdin.read(); raise SystemExit(1)"
    hangs, other = await talk(sandbox, "while True: pass", partner, replace(SHORT, wall_time_s=1.0), LONGER)
    assert (hangs.exit, hangs.partner_ended) == (Exit.TIME_LIMIT, ended)
    assert (other.exit_code, other.partner_ended) == (1, not ended)


BOTH_WRITE = f"import sys\nsys.stdout.write('x' * {3 * MIB}); sys.stdout.flush()\nprint(len(sys.stdin.read({3 * MIB})))"


async def test_both_may_write_more_than_a_pipe_holds_before_they_read(sandbox: LocalSandbox) -> None:
    for result in await talk(sandbox, BOTH_WRITE, BOTH_WRITE, times=2):
        assert (result.exit, result.exit_code, len(result.stdout)) == (Exit.EXITED, 0, 3 * MIB + 8)
        assert result.stdout.endswith(b"x%d\n" % (3 * MIB))


async def test_a_partner_can_read_all_that_a_program_printed_before_it_ended(sandbox: LocalSandbox) -> None:
    later = "import sys, time; time.sleep(0.3); print(len(sys.stdin.read()))"
    for one, other in ((f"print('x' * {5 * MIB})", later), (later, f"print('x' * {5 * MIB})")):
        lengths = sorted(len(result.stdout) for result in await talk(sandbox, one, other, times=2))
        assert lengths == [8, 5 * MIB + 1]


async def test_output_beyond_the_limit_ends_the_program_and_not_its_partner(sandbox: LocalSandbox) -> None:
    small = replace(WIDE, output_bytes=MIB)
    flood = "import sys\nwhile True: sys.stdout.write('x' * 65536)"
    flooded, other = await talk(sandbox, flood, "import sys; print(len(sys.stdin.read()) > 0)", small)
    assert flooded.exit is Exit.OUTPUT_LIMIT
    assert (other.exit, other.stdout) == (Exit.EXITED, b"True\n")


SPOILS_PIPES = """import fcntl, os, signal, socket, sys
for fd in (0, 1):
    for act in (
        lambda: fcntl.fcntl(fd, 1031, 4096),                          # F_SETPIPE_SZ
        lambda: fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC | os.O_DIRECT),
        lambda: fcntl.fcntl(fd, fcntl.F_SETOWN, 1),
        lambda: fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL),
        lambda: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB),
        lambda: os.fchmod(fd, 0), lambda: os.fchown(fd, 0, 0), lambda: os.ftruncate(fd, 0),
    ):
        try: act()
        except OSError: pass
own = []
for path in ("/proc/self/fd/0", "/proc/self/fd/1"):
    for mode in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
        try: own.append(os.open(path, mode | os.O_NONBLOCK))
        except OSError: pass
for fd in own:  # fill the pipes from the wrong side, and empty them
    for act in (lambda: os.write(fd, b"x" * 65536), lambda: os.read(fd, 65536)):
        try: act()
        except OSError: pass
seen = sorted(os.listdir("/proc/self/fd"), key=int)
others = [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) not in (os.getpid(), 1)]
for path in [f"/proc/1/fd/{n}" for n in range(128)]:
    try: own.append(os.open(path, os.O_RDWR)); os.write(2, b"opened")
    except OSError: pass
os.write(2, b"others" * len(others))
if os.fork() == 0:
    import time
    os.setsid(); time.sleep(60)
"""


async def test_a_program_that_spoils_its_pipes_harms_only_its_own_dialogue(sandbox: LocalSandbox) -> None:
    """Its partner sees a normal end, init counts what it prints, and the next dialogue of the pair is whole."""
    reads = "import sys; sys.stdin.buffer.read(); print('fine')"
    async with sandbox.with_partners(Program(PYTHON, SPOILS_PIPES, WIDE), Program(PYTHON, reads, WIDE)) as (one, other):
        for _ in range(2):
            spoils, patient = await one.dialogue_with(other)
            assert (patient.exit, patient.exit_code, patient.stdout) == (Exit.EXITED, 0, b"fine\n"), patient
            assert (spoils.exit, spoils.exit_code, spoils.stderr) == (Exit.EXITED, 0, b""), spoils
    asks, _ = await talk(sandbox, ASKS.format(rounds=50), ANSWERS)
    assert asks.exit_code == 0


async def test_descriptors_of_a_program_in_a_conversation_are_its_three_streams(sandbox: LocalSandbox) -> None:
    lists = "import os, sys; sys.stderr.write(str(sorted(os.listdir('/proc/self/fd'), key=int)))"
    for result in await talk(sandbox, lists, lists, times=2):
        assert result.stderr == b"['0', '1', '2', '3']"  # 3 is the folder itself


async def test_after_a_slot_died_in_a_conversation_the_two_programs_have_another_dialogue(
    sandbox: LocalSandbox,
) -> None:
    """Also when it died before its partner took the invitation, which then stays in the socket."""
    for victim in (0, 1):
        async with sandbox.with_partners(Program(PYTHON, "input()", WIDE), Program(PYTHON, "input()", WIDE)) as (
            one,
            other,
        ):
            talking = asyncio.ensure_future(one.dialogue_with(other))
            await asyncio.sleep(0)
            os.kill(sandbox.pids()[victim], signal.SIGKILL)
            with pytest.raises(SandboxError):
                await talking
        asks, answers = await talk(sandbox, ASKS.format(rounds=20), ANSWERS)
        assert (asks.exit_code, answers.exit_code) == (0, 0), asks.stderr


async def test_a_conversation_leaves_no_descriptor_in_the_gateway(sandbox: LocalSandbox) -> None:
    await talk(sandbox, ASKS.format(rounds=5), ANSWERS)
    before = len(os.listdir("/proc/self/fd"))
    await talk(sandbox, ASKS.format(rounds=5), ANSWERS, times=3)
    assert len(os.listdir("/proc/self/fd")) == before


# Programs that never flush, and read in a way that does not flush for them.
FORGETFUL = {
    "python": "import sys\nfor n in range(3):\n    sys.stdout.write(f'{n}\\n')\n    sys.stdin.readline()\n",
    "pypy": "import sys\nfor n in range(3):\n    sys.stdout.write(f'{n}\\n')\n    sys.stdin.readline()\n",
    "c": "#include <stdio.h>\n#define int long long\nsigned main() { char line[99];\n"
    'for (signed n = 0; n < 3; n++) { printf("%d\\n", n); fgets(line, 99, stdin); } }',
    "cpp": "#include <bits/stdc++.h>\nusing namespace std;\n#define int long long\n#define endl '\\n'\n"
    "signed main() { ios::sync_with_stdio(false); cin.tie(nullptr); string line;\n"
    "for (int n = 0; n < 3; n++) { cout << n << endl; getline(cin, line); } }",
    "java": "class Main { public static void main(String[] a) { var in = new java.util.Scanner(System.in);\n"
    'for (int n = 0; n < 3; n++) { System.out.print(n + "\\n"); in.nextLine(); } } }',
}
COUNTS = """import sys
for n in range(3):
    if sys.stdin.readline().strip() != str(n): sys.exit(1)
    print("go on", flush=True)
"""


@pytest.mark.parametrize("language", FORGETFUL)
async def test_a_program_need_not_flush_in_an_unbuffered_dialogue(sandbox: LocalSandbox, language: str) -> None:
    if language not in installed():
        pytest.skip(f"{language} is not installed")
    grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()))
    for unbuffered in (True, False):
        tests = InteractiveTests((StdinCase("", ""),), JudgeProgram(COUNTS, "python"), unbuffered)
        limits = Limits(wall_time_s=60.0 if unbuffered else 1.0, cpu_time_s=60.0)
        verdict = await grader.grade(Submission(tests, FORGETFUL[language], language=language, limits=limits))
        if unbuffered:
            assert verdict.kind is VerdictKind.ACCEPTED, verdict
        elif language != "java":  # which never buffers
            assert verdict.kind is VerdictKind.TIME_LIMIT_EXCEEDED, verdict


SPEAKS_AND_ENDS = "import os; os.write(1, b'x')"
SPEAKS_AND_READS = "import os; os.write(1, b'y'); os.read(0, 1)"


@contextlib.contextmanager
def busy_cpu() -> Iterator[None]:
    """Bind this process, and what it starts, to one CPU with six processes that use it up."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    hogs = [subprocess.Popen([sys.executable, "-c", HOG]) for _ in range(6)]
    try:
        yield
    finally:
        os.sched_setaffinity(0, cpus)
        for hog in hogs:
            hog.kill()
            hog.wait()


async def test_a_word_that_came_before_the_program_started_is_not_taken_from_its_time() -> None:
    """On a busy CPU the partner often speaks first. The program's time must not become negative by that."""
    with busy_cpu():
        made = open_sandbox(SandboxSection(slots=1))
        try:
            await made.start()
            assert isinstance(made, LocalSandbox)
            early, reads = Program(PYTHON, SPEAKS_AND_ENDS, WIDE), Program(PYTHON, SPEAKS_AND_READS, LATEST)
            async with made.with_partners(early, reads) as (one, other):
                for _ in range(100):
                    first, _ = await one.dialogue_with(other)
                    assert first.exit is Exit.EXITED
                    assert 0 < first.wall_time_s < 60
        finally:
            await made.close()
