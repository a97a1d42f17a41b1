"""Grades every program of programs/*.toml in every backend that this host can run. Each program gets an expected
verdict and leaves nothing behind, and an honest submission after it is accepted. `one-user` is the local backend as a
service without root has it. The tests of `runsc`, in which a fork takes milliseconds, are soak tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import platform
import random
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry
from tests.attack_corpus import Attack
from tests.host_state import HostState
from tests.userns_runners import userns_sandbox

from nouscoder.config import SandboxSection
from nouscoder.domain.submission import InteractiveTests, JudgeProgram, Limits, StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import (
    Sandbox,
    SandboxUnavailable,
    local,
    open_sandbox,
)
from nouscoder.verifier.sandbox.runners.pods import GvisorSandbox
from nouscoder.verifier.toolchains.languages import installed

pytestmark = pytest.mark.asyncio(loop_scope="module")
CANARY = Submission(StdinTests((StdinCase("41\n", "42"),)), "print(int(input()) + 1)", limits=Limits(20.0, 10.0))
INTERACTOR = JudgeProgram("print(41, flush=True)\nraise SystemExit(input() != '42')", "python")
DIALOGUE_CANARY = Submission(
    InteractiveTests((StdinCase("", ""),), INTERACTOR), "print(int(input()) + 1)", limits=Limits(20.0, 10.0)
)
POOLS = {"gvisor": "runner_pool", "userns": "userns_runner_pool"}
PROJECT = Path(__file__).resolve().parents[2]
SETTLE_S = 10.0
ROUNDS = int(os.environ.get("NOUSCODER_ATTACK_ROUNDS", "20"))
CONCURRENCY = 8
NOT_ROOT, PUBLIC_PYTHON = 12345, "/usr/bin/python3"  # a user id, and an interpreter that every user may read


def children(pid: int) -> set[int]:
    """The running children of a process."""
    found: set[int] = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found |= {int(child) for child in (thread / "children").read_text().split()}
    return found


def family(others: Set[int]) -> dict[int, str]:
    """The names of this process's running descendants by pid, without its children `others` and their descendants.

    These are the services of other tests in this process, whose sandboxes come and go.
    """
    found: dict[int, str] = {}
    todo = list(children(os.getpid()) - others)
    while todo:
        pid = todo.pop()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
            todo += children(pid)
    return found


LOOK_IN_POD = """
import json, os
def tree(folder): return sorted(os.path.join(at, name) for at, _, names in os.walk(folder) for name in names)
names = [open(f"/proc/{pid}/comm").read().strip() for pid in os.listdir("/proc") if pid.isdigit()]
files = [tree(folder) for folder in ("/tmp", "/dev", "/program", "/run", "/var/tmp")]
print(json.dumps([sorted(names), sorted(open("/proc/1/mounts")), files, len(os.listdir("/proc/1/fd"))]))
"""


@dataclass(frozen=True, slots=True)
class HostView:
    """Reads this process's descendants and the host's state. gVisor's helper processes are recognised by name."""

    backend: str
    others: frozenset[int]  # children of this process that are not the backend's

    async def look(self) -> tuple[int, HostState]:
        """The number of processes, and the state."""
        return len([name for name in family(self.others).values() if self._is_ours(name)]), HostState.now()

    def _is_ours(self, name: str) -> bool:
        return self.backend != "runsc" or not name.startswith(("runsc", "exe", "systrap"))


@dataclass(frozen=True, slots=True)
class PodContents:
    """State of a runner pod that no submission may change."""

    parts: tuple[Any, ...]  # mounts, files, number of descriptors of its first process

    def left_since(self, before: PodContents) -> list[str]:
        """The parts that are not as before."""
        return [str(part) for part, old in zip(self.parts, before.parts, strict=True) if part != old]


@dataclass(frozen=True, slots=True)
class PodView:
    """Reads the state inside the runner pod in use, because this host runs no candidate."""

    sandbox: GvisorSandbox
    namespace: str

    async def look(self) -> tuple[int, PodContents]:
        """The number of processes, and the state."""
        (name,) = self.sandbox.pool.names
        command = ("kubectl", "exec", "-n", self.namespace, name, "--", "python3", "-I", "-S", "-c", LOOK_IN_POD)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        async with asyncio.timeout(60):
            output, _ = await process.communicate()
        names, *rest = json.loads(output)
        return len(names), PodContents(tuple(rest))


@dataclass(frozen=True, slots=True)
class Arena:
    """A started backend with one slot, and the state of its idle environment."""

    sandbox: Sandbox
    grader: Grader
    filled: Mapping[str, str]
    view: HostView | PodView
    num_processes: int
    state: Any

    async def check_canary(self) -> None:
        """Check that an honest submission is accepted."""
        verdict = await self.grader.grade(CANARY)
        assert verdict.kind is VerdictKind.ACCEPTED, verdict

    async def check_nothing_left(self) -> None:
        """Wait for the idle state, at most SETTLE_S seconds."""
        end = asyncio.get_running_loop().time() + SETTLE_S
        while True:
            num_processes, state = await self.view.look()
            left = state.left_since(self.state)
            if num_processes <= self.num_processes and not left:
                return
            about = f"{num_processes} processes, {self.num_processes} when idle; left: {left}"
            assert asyncio.get_running_loop().time() < end, about
            await asyncio.sleep(0.02)


@contextlib.contextmanager
def without_root() -> Iterator[None]:
    """Start sandboxes as a service does whose user is not root: the harness runs as another user.

    It may read every file, because the project may be in a home folder of root. Candidates have no capability.
    """
    if os.geteuid() != 0 or shutil.which("setpriv") is None or not os.path.exists(PUBLIC_PYTHON):
        pytest.skip(f"the user cannot be changed: not root, or setpriv or {PUBLIC_PYTHON} is missing")
    command, rights = local.python_command, "+dac_override,+dac_read_search"

    def as_another_user(python: str, entry: Path) -> list[str]:
        user = (f"--reuid={NOT_ROOT}", f"--regid={NOT_ROOT}", "--clear-groups")
        return ["setpriv", *user, f"--inh-caps={rights}", f"--ambient-caps={rights}", *command(python, entry)]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(local, "python_command", as_another_user)
        patched.setattr(local, "host_is_root", lambda: False)
        yield


async def open_arena(
    backend: str, filled: Mapping[str, str], slots: int = 1, pool: SandboxSection | None = None, python: str = ""
) -> Arena:
    """Start a backend. Skips with the reason when this host cannot run it."""
    others = frozenset(children(os.getpid()))
    try:
        here = backend == "runners-in-userns"
        config = pool or SandboxSection(backend="userns" if here else backend, python=python, pool_spares=0)
        changes = {"slots": slots, "max_sessions": 100_000}  # never replaced: its idle state is compared
        config = config.model_copy(update=changes)
        sandbox = userns_sandbox(config) if here else open_sandbox(config)
        await sandbox.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()))
    await grader.grade(CANARY)
    await asyncio.gather(*(grader.grade(DIALOGUE_CANARY) for _ in range(slots)))  # starts each slot's partner
    await asyncio.sleep(0.3)  # the slots make their next namespaces
    gc.collect()  # what other tests of this process left open is closed now, not while descriptors are compared
    view: HostView | PodView = HostView(backend, others)
    if pool is not None:
        assert isinstance(sandbox, GvisorSandbox)
        view = PodView(sandbox, json.loads(Path(config.pool_template).read_text())["metadata"]["namespace"])
    return Arena(sandbox, grader, filled, view, *await view.look())


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=[
        "local",
        pytest.param("one-user", marks=pytest.mark.heavy),
        pytest.param("runsc", marks=pytest.mark.soak),
        pytest.param("runners-in-userns", marks=pytest.mark.soak),
        pytest.param("gvisor", marks=pytest.mark.cluster),
        pytest.param("userns", marks=pytest.mark.cluster),
    ],
)
async def arena(request: pytest.FixtureRequest) -> AsyncIterator[Arena]:
    name = f"nouscoder-attacked-{os.getpid()}"
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as gateway,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as named,
    ):
        abstract.bind("\0" + name)
        abstract.listen()
        named.bind(f"{folder}/socket")
        named.listen()
        os.chmod(folder, 0o755)
        os.chmod(f"{folder}/socket", 0o777)
        filled = {
            "@PROJECT@": str(PROJECT),
            "@PORT@": str(gateway.getsockname()[1]),
            "@ABSTRACT@": name,
            "@SOCKET@": f"{folder}/socket",
            "@HOST@": socket.gethostname(),
        }
        others = children(os.getpid())
        pool = request.getfixturevalue(POOLS[request.param]) if request.param in POOLS else None
        one_user = request.param == "one-user"
        with without_root() if one_user else contextlib.nullcontext():
            python = PUBLIC_PYTHON if one_user else ""
            made = await open_arena("local" if one_user else request.param, filled, pool=pool, python=python)
            yield made
            await made.sandbox.close()
        async with asyncio.timeout(SETTLE_S):
            while family(others):
                await asyncio.sleep(0.02)


def check(attack: Attack, verdict: Verdict) -> None:
    """Check that both tests have an expected verdict and that it shows nothing of the service."""
    assert verdict.kind in attack.verdicts, verdict
    if verdict.kind is not VerdictKind.COMPILE_ERROR:
        assert verdict.graded == 2 or attack.table.get("profile") == "lcb"  # which stops at the first failure
        assert {outcome.outcome for outcome in verdict.tests} <= attack.verdicts, verdict.tests


def is_meant(attack: Attack, sandbox: Sandbox) -> bool:
    """Whether the attack has a meaning on this machine and backend, and its language is installed."""
    machines = (attack.table.get("machine", platform.machine()),)
    meant = platform.machine() in machines and sandbox.name in attack.table.get("backends", (sandbox.name,))
    two_users = "separate-users" in sandbox.isolation
    if attack.language not in installed() or not (two_users or not attack.table.get("root", False)):
        return False
    home = installed()[attack.language].home  # another user cannot use a toolchain in a home folder of root
    return meant and (two_users or home is None or not home.is_relative_to(Path("~root").expanduser()))


@pytest.mark.timeout(900)  # a compiler that others keep from the CPU has up to 540 s (docs/grading.md)
async def test_attack(arena: Arena, attack: Attack) -> None:
    if not is_meant(attack, arena.sandbox):
        where = f"{attack.language} on {platform.machine()} with {arena.sandbox.name}"
        pytest.skip(f"{where}: {attack.table.get('why', 'call numbers, not installed, or in a home folder of root')}")
    verdict = await arena.grader.grade(attack.submission(arena.filled))
    check(attack, verdict)
    await arena.check_canary()
    await arena.check_nothing_left()


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("backend", ["local", "runsc"])
async def test_repeated_rounds_of_the_corpus_leave_memory_and_descriptors_unchanged(
    attacks: Mapping[str, Attack], backend: str
) -> None:
    """ROUNDS rounds, eight attacks at once, each round in another order: memory and descriptors do not grow."""
    filled = {"@PROJECT@": str(PROJECT), "@PORT@": "9", "@ABSTRACT@": "nobody", "@SOCKET@": "/nowhere/no.socket"}
    filled["@HOST@"] = socket.gethostname()
    arena = await open_arena(backend, filled, slots=CONCURRENCY)
    meant = [attack for attack in attacks.values() if is_meant(attack, arena.sandbox)]
    lane = asyncio.Semaphore(CONCURRENCY)

    async def grade(attack: Attack) -> None:
        async with lane:
            verdict = await arena.grader.grade(attack.submission(filled, patience=8.0))
        check(attack, verdict)

    try:
        sizes = []
        for number in range(ROUNDS):
            random.Random(number).shuffle(meant)
            await asyncio.gather(*(grade(attack) for attack in meant))
            await arena.check_canary()
            await arena.check_nothing_left()
            gc.collect()
            sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"))
        print(f"{backend}: resident MiB a round {[size >> 20 for size in sizes]}")
        # The first rounds fill caches and the allocator's free lists.
        settled = sizes[len(sizes) // 4]
        assert max(sizes) < settled + max(32 << 20, settled // 5), sizes
    finally:
        await arena.sandbox.close()
