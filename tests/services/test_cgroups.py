"""Groups of slots in both versions: limits are written once, no group is left, and OOM kills are memory limits."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from nouscoder.config import SandboxSection
from nouscoder.domain.submission import Limits
from nouscoder.verifier.sandbox import Exit, Program, SandboxUnavailable, open_sandbox
from nouscoder.verifier.sandbox.cgroup import ROOT, UNGROUPED, Groups
from nouscoder.verifier.sandbox.local import HostLaunch
from nouscoder.verifier.sandbox.slot import Link
from nouscoder.verifier.toolchains.languages import installed


def make_files(folder: Path, *names: str) -> None:
    """Make the files that the kernel would make."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("")


def test_version_1_groups_are_made_in_the_own_group(tmp_path: Path) -> None:
    for controller in ("memory", "pids"):
        (tmp_path / controller / "mine").mkdir(parents=True)
    groups = Groups(tmp_path, "4:memory:/mine\n8:pids:/elsewhere\n0::/\n")
    assert sorted(groups.names) == ["memory", "pids"]
    assert not list(tmp_path.glob("**/nouscoder-*"))  # no group before a slot needs one
    folders = [tmp_path / "memory" / "mine", tmp_path / "pids"]  # a path that is not visible here: the mount is used
    for folder in folders:
        make_files(folder / f"{groups._prefix}.3", "memory.oom_control")
    group = groups.make(3)
    assert group.procs_files == tuple(
        sorted(str(folder / f"{groups._prefix}.3" / "cgroup.procs") for folder in folders)
    )
    group.limit(memory=1000, pids=5)
    made = {file.name: file.read_text() for folder in folders for file in folder.glob("nouscoder-*/*")}
    assert (made["memory.limit_in_bytes"], made["pids.max"]) == ("1000", "5")


def test_version_2_groups_need_the_process_to_leave_its_group(tmp_path: Path) -> None:
    make_files(tmp_path, "cgroup.controllers")
    make_files(tmp_path / "mine", "cgroup.subtree_control")
    groups = Groups(tmp_path, "0::/mine\n")
    make_files(tmp_path / "mine" / f"{groups._prefix}.0", "memory.events")
    assert sorted(groups.names) == ["memory", "pids"]
    assert (tmp_path / "mine" / "cgroup.subtree_control").read_text() == "+memory +pids"
    assert (tmp_path / "mine" / "nouscoder-service" / "cgroup.procs").read_text() == str(os.getpid())
    group = groups.make(0)
    events = tmp_path / "mine" / f"{groups._prefix}.0" / "memory.events"
    events.write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert group.num_killed() == 2
    group.limit(memory=4096)
    assert (events.parent / "memory.max").read_text() == "4096"


def test_a_slot_has_a_share_of_the_cpus_in_both_versions(tmp_path: Path) -> None:
    """Groups have equal shares by default. Without a group, 60 processes of one slot get 60 shares."""
    (tmp_path / "one" / "cpu").mkdir(parents=True)
    groups = Groups(tmp_path / "one", "1:cpu:/\n0::/\n")
    (procs,) = groups.make(0).procs_files
    (folder,) = (tmp_path / "one" / "cpu").glob("nouscoder-*")
    assert (groups.names, procs) == (("cpu",), str(folder / "cgroup.procs"))
    written: list[str] = []
    make_files(tmp_path / "two", "cgroup.controllers", "cgroup.subtree_control")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_text", lambda file, text: written.append(f"{file.name} {text}"))
        Groups(tmp_path / "two", "0::/\n")
    assert "cgroup.subtree_control +cpu" in written


@pytest.mark.parametrize("own", ["1:cpu:/\n4:memory:/\n0::/\n", "0::/\n"])
def test_an_idle_group_is_made_where_the_kernel_has_one_and_removed(tmp_path: Path, own: str) -> None:
    version_1 = own.startswith("1")
    make_files(tmp_path, *[] if version_1 else ["cgroup.controllers", "cgroup.subtree_control"])
    cpu = tmp_path / "cpu" if version_1 else tmp_path
    for name in ("cpu", "memory") if version_1 else ():
        (tmp_path / name).mkdir()
    groups = Groups(tmp_path, own)
    assert groups.make_idle() is None  # an older kernel: no file cpu.idle
    assert not list(tmp_path.glob("**/*.idle"))
    made = cpu / f"{groups._prefix}.idle"
    with pytest.MonkeyPatch.context() as patch:
        mkdir = Path.mkdir

        def with_file(folder: Path, *args: object, **options: bool) -> None:
            mkdir(folder, **options)
            if folder == made:
                (folder / "cpu.idle").write_text("")

        patch.setattr(Path, "mkdir", with_file)
        idle = groups.make_idle()
    assert idle is not None
    assert ((made / "cpu.idle").read_text(), idle.procs) == ("1", str(made / "cgroup.procs"))
    assert idle.own == str((cpu if version_1 else cpu / "nouscoder-service") / "cgroup.procs")
    (made / "cpu.idle").unlink()  # as the kernel's files go with their group
    idle.remove()
    assert not made.exists()


def test_two_sandboxes_of_one_process_share_no_group(tmp_path: Path) -> None:
    """The invariant: the removal of one sandbox's groups leaves those of another."""
    (tmp_path / "pids" / "mine").mkdir(parents=True)
    first, second = (Groups(tmp_path, "8:pids:/mine\n").make(0) for _ in range(2))
    first.remove()
    (left,) = (tmp_path / "pids" / "mine").glob("nouscoder-*")
    assert left.is_dir()
    second.remove()
    assert not list((tmp_path / "pids" / "mine").glob("nouscoder-*"))


def test_a_host_without_groups_gives_none(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "0::/\n")
    assert groups.names == ()
    group = groups.make(0)
    assert group.procs_files == ()
    group.limit(memory=1)
    group.remove()
    assert (group.num_killed(), UNGROUPED.num_killed()) == (0, 0)


def ours() -> set[Path]:
    """The groups of this process."""
    return set(ROOT.glob(f"**/nouscoder-{os.getpid()}-*"))


async def test_processes_over_the_groups_limit_are_a_memory_limit_and_close_leaves_no_group() -> None:
    sandbox = open_sandbox(SandboxSection(slots=1, tmp_bytes=1 << 20))
    try:
        await sandbox.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    try:
        if "cgroup:memory" not in sandbox.isolation:
            pytest.skip("this host does not allow memory groups")
        assert ours()
        shared = (  # shared mappings, which a sum of resident sizes cannot distinguish from a common one
            "import mmap, os\nfor _ in range(12):\n    if os.fork() == 0:\n        m = mmap.mmap(-1, 40 << 20)\n"
            "        for at in range(0, 40 << 20, 4096): m[at] = 1\n        import time; time.sleep(9)\n"
            "os.wait()\n"
        )
        limits = Limits(wall_time_s=8, cpu_time_s=8, memory_bytes=64 << 20, output_bytes=1 << 10, processes=30)
        async with sandbox.session(Program(installed()["python"], shared, limits)) as session:
            assert (await session.run(b"")).exit is Exit.MEMORY_LIMIT
        async with sandbox.session(Program(installed()["python"], "print(input())", limits)) as session:
            assert (await session.run(b"canary")).stdout == b"canary\n"
    finally:
        await sandbox.close()
    assert not ours()


EVASIONS = {
    "processes that nobody waits for": (
        Exit.TIME_LIMIT,
        "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "for _ in range(4):\n    if os.fork() == 0:\n"
        "        while time.process_time() < 0.5: pass\n        os._exit(0)\n"
        "try: os.wait()\nexcept ChildProcessError: pass\n",
    ),
    "shared mappings of many processes": (
        Exit.MEMORY_LIMIT,
        "import mmap, os, time\nfor _ in range(9):\n    if os.fork() == 0:\n        m = mmap.mmap(-1, 40 << 20)\n"
        "        for at in range(0, 40 << 20, 4096): m[at] = 1\n        time.sleep(1)\n        os._exit(0)\n"
        "for _ in range(9): os.wait()\n",
    ),
    "buffers of sockets": (
        Exit.MEMORY_LIMIT,
        "import os, socket\nfor _ in range(5):\n    if os.fork(): continue\n    kept = []\n"
        "    while len(kept) < 400:\n        pair = socket.socketpair()\n        kept += pair\n"
        "        for end in pair:\n            end.setblocking(False)\n            try:\n"
        "                while True: end.send(b'x' * 32768)\n            except OSError: pass\n"
        "    os._exit(0)\nfor _ in range(5): os.wait()\n",
    ),
}


async def ends_of(code: str) -> list[Exit]:
    """How two runs of a program end in a sandbox with groups."""
    sandbox = open_sandbox(SandboxSection(slots=1))
    try:
        await sandbox.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    try:
        if "cgroup:memory" not in sandbox.isolation:
            pytest.skip("this host does not allow memory groups")
        limits = Limits(wall_time_s=60, cpu_time_s=1, memory_bytes=64 << 20, output_bytes=1 << 10, processes=30)
        async with sandbox.session(Program(installed()["python"], code, limits)) as session:
            return [(await session.run(b"")).exit for _ in range(2)]
    finally:
        await sandbox.close()


@pytest.mark.parametrize("name", EVASIONS)
async def test_what_the_harness_cannot_measure_counts(name: str) -> None:
    exit_, code = EVASIONS[name]
    assert await ends_of(code) == [exit_, exit_]


async def test_a_harness_is_in_its_group_before_it_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the service is late: it goes on only when the harness has a child."""
    start = HostLaunch.open

    async def late(launch: HostLaunch) -> Link:
        link = await start(launch)
        async with asyncio.timeout(60):
            while not Path(f"/proc/{link.pid}/task/{link.pid}/children").read_text():
                await asyncio.sleep(0.01)
        return link

    monkeypatch.setattr(HostLaunch, "open", late)
    exit_, code = EVASIONS["processes that nobody waits for"]
    assert await ends_of(code) == [exit_, exit_]


def test_groups_of_a_service_that_was_killed_are_swept(tmp_path: Path) -> None:
    (tmp_path / "memory" / "nouscoder-999999999-0").mkdir(parents=True)
    (tmp_path / "memory" / f"nouscoder-{os.getppid()}-0").mkdir()
    Groups(tmp_path, "4:memory:/\n")
    assert [folder.name for folder in (tmp_path / "memory").iterdir()] == [f"nouscoder-{os.getppid()}-0"]
