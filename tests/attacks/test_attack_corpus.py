"""Every program of programs/*.toml, through the grader and every backend that this host can run: it gets the verdict it
must get, leaves nothing behind, and an honest submission right after it is graded as ever. Through `runsc`, where a
fork takes milliseconds, with the soak tests.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import platform
import random
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from nouscoder.domain.submission import Limits, StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import PoolConfig, Sandbox, SandboxConfig, SandboxUnavailable, open_sandbox
from nouscoder.verifier.sandbox.gvisor import GvisorSandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")
CANARY = Submission(StdinTests((StdinCase("41\n", "42"),)), "print(int(input()) + 1)", limits=Limits(20.0, 10.0))
PROJECT = Path(__file__).resolve().parents[2]
SETTLE_S = 10.0
ROUNDS = int(os.environ.get("NOUSCODER_ATTACK_ROUNDS", "20"))
CONCURRENCY = 8
NO_POOL = PoolConfig()


class Attack(Protocol):
    """See conftest.py."""

    name: str
    verdicts: frozenset[VerdictKind]
    table: Mapping[str, Any]

    def submission(self, filled: Mapping[str, str], patience: float = 1.0) -> Submission: ...


def family(pid: int) -> dict[int, str]:
    """The living processes below `pid`: pid to name."""
    found: dict[int, str] = {}
    todo = [pid]
    while todo:
        parent = todo.pop()
        try:
            for thread in Path(f"/proc/{parent}/task").iterdir():
                children = [int(child) for child in (thread / "children").read_text().split()]
                todo += children
                for child in children:
                    found[child] = Path(f"/proc/{child}/comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@dataclass(frozen=True, slots=True)
class HostState:
    """What no submission may change on the host."""

    mounts: str
    cgroups: frozenset[str]
    objects: tuple[int, ...]  # System V shared memory, semaphores, message queues
    strange_files: frozenset[str]  # of users that only sandboxes have
    num_descriptors: int

    @staticmethod
    def now() -> HostState:
        """As it is."""
        own = f"nouscoder-{os.getpid()}"
        cgroups = {folder for folder, _, _ in os.walk("/sys/fs/cgroup") if own in folder}
        objects = tuple(len(Path(f"/proc/sysvipc/{kind}").read_text().split("\n")) for kind in ("shm", "sem", "msg"))
        strange = set()
        for folder in ("/", "/tmp", "/dev/shm", "/var/tmp", "/run"):
            for entry in os.scandir(folder) if os.path.isdir(folder) else ():
                try:
                    if entry.stat(follow_symlinks=False).st_uid >= 1_000_000_000:
                        strange.add(entry.path)
                except FileNotFoundError:
                    continue
        mounts = Path("/proc/self/mounts").read_text()
        return HostState(mounts, frozenset(cgroups), objects, frozenset(strange), len(os.listdir("/proc/self/fd")))


LOOK_IN_POD = """
import json, os
def tree(folder): return sorted(os.path.join(at, name) for at, _, names in os.walk(folder) for name in names)
names = [open(f"/proc/{pid}/comm").read().strip() for pid in os.listdir("/proc") if pid.isdigit()]
files = [tree(folder) for folder in ("/tmp", "/dev", "/program", "/run", "/var/tmp")]
print(json.dumps([sorted(names), sorted(open("/proc/1/mounts")), files, len(os.listdir("/proc/1/fd"))]))
"""


@dataclass(frozen=True, slots=True)
class HostView:
    """Of the processes below this one, and of the host. gVisor's own helper processes are told by their name."""

    backend: str

    async def look(self) -> tuple[int, HostState]:
        """How many processes there are, and the rest."""
        return len([name for name in family(os.getpid()).values() if self._is_ours(name)]), HostState.now()

    def _is_ours(self, name: str) -> bool:
        return self.backend != "runsc" or not name.startswith(("runsc", "exe", "systrap"))


@dataclass(frozen=True, slots=True)
class PodView:
    """Of the runner pod in use, from inside: this host runs no candidate."""

    sandbox: GvisorSandbox
    namespace: str

    async def look(self) -> tuple[int, Any]:
        """How many processes there are, and the rest."""
        (name,) = self.sandbox.pool.names
        command = ("kubectl", "exec", "-n", self.namespace, name, "--", "python3", "-I", "-S", "-c", LOOK_IN_POD)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        async with asyncio.timeout(20):
            told, _ = await process.communicate()
        names, *rest = json.loads(told)
        return len(names), rest


@dataclass(frozen=True, slots=True)
class Arena:
    """A started backend with one slot, and what a quiet place looks like with it."""

    sandbox: Sandbox
    grader: Grader
    filled: Mapping[str, str]
    view: HostView | PodView
    num_processes: int
    state: Any

    async def check_canary(self) -> None:
        """An honest submission is graded as ever."""
        verdict = await self.grader.grade(CANARY)
        assert verdict.kind is VerdictKind.ACCEPTED, verdict

    async def check_nothing_left(self) -> None:
        """Back to the quiet place, within a limit."""
        end = asyncio.get_running_loop().time() + SETTLE_S
        while True:
            num_processes, state = await self.view.look()
            if num_processes <= self.num_processes and state == self.state:
                return
            assert asyncio.get_running_loop().time() < end, f"left: {num_processes} of {self.num_processes}, {state}"
            await asyncio.sleep(0.02)


async def open_arena(backend: str, filled: Mapping[str, str], slots: int = 1, pool: PoolConfig = NO_POOL) -> Arena:
    """Skips with what is missing when this host cannot run the backend."""
    try:
        sandbox = open_sandbox(SandboxConfig(backend=backend, slots=slots, pool=pool))
        await sandbox.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()))
    await grader.grade(CANARY)
    await asyncio.sleep(0.3)  # the slot makes its next namespaces
    view: HostView | PodView = HostView(backend)
    if isinstance(sandbox, GvisorSandbox):
        view = PodView(sandbox, json.loads(Path(pool.template).read_text())["metadata"]["namespace"])
    return Arena(sandbox, grader, filled, view, *await view.look())


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=[
        "local",
        pytest.param("runsc", marks=pytest.mark.soak),
        pytest.param("gvisor", marks=pytest.mark.cluster),
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
        }
        before = set(family(os.getpid()))
        pool = request.getfixturevalue("runner_pool") if request.param == "gvisor" else NO_POOL
        made = await open_arena(request.param, filled, pool=pool)
        yield made
        await made.sandbox.close()
        async with asyncio.timeout(SETTLE_S):
            while set(family(os.getpid())) - before:
                await asyncio.sleep(0.02)


def check(attack: Attack, verdict: Verdict) -> None:
    """The right verdict, for both tests, and no word of ours in it."""
    assert verdict.kind in attack.verdicts, verdict
    if verdict.kind is not VerdictKind.COMPILE_ERROR:
        assert verdict.graded == 2
        assert {outcome.outcome for outcome in verdict.tests} <= attack.verdicts, verdict.tests


def is_meant(attack: Attack, backend: str) -> bool:
    """Whether it says anything about this machine and backend."""
    machines = (attack.table.get("machine", platform.machine()),)
    return platform.machine() in machines and backend in attack.table.get("backends", (backend,))


async def test_attack(arena: Arena, attack: Attack) -> None:
    if not is_meant(attack, arena.sandbox.name):
        pytest.skip(
            f"not for {platform.machine()} with {arena.sandbox.name}: {attack.table.get('why', 'call numbers')}"
        )
    verdict = await arena.grader.grade(attack.submission(arena.filled))
    check(attack, verdict)
    await arena.check_canary()
    await arena.check_nothing_left()


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("backend", ["local", "runsc"])
async def test_the_corpus_again_and_again_leaves_the_service_as_it_was(
    attacks: Mapping[str, Attack], backend: str
) -> None:
    """ROUNDS times, eight at once, in an order of its own each time: memory and descriptors stay what they were."""
    filled = {"@PROJECT@": str(PROJECT), "@PORT@": "9", "@ABSTRACT@": "nobody", "@SOCKET@": "/tmp/no.socket"}
    arena = await open_arena(backend, filled, slots=CONCURRENCY)
    meant = [attack for attack in attacks.values() if is_meant(attack, backend)]
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
