"""Attacks on parts of the `local` sandbox, in addition to the corpus: visible state, slots, state after close."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from tests.host_state import HostState

from nouscoder.config import SandboxSection
from nouscoder.domain.submission import Limits
from nouscoder.verifier.sandbox import (
    Exit,
    Program,
    RunResult,
    Sandbox,
    SandboxError,
    SandboxUnavailable,
    local,
    open_sandbox,
)
from nouscoder.verifier.sandbox.local import LocalSandbox
from nouscoder.verifier.toolchains.languages import installed, registry

pytestmark = pytest.mark.asyncio(loop_scope="module")
PYTHON = registry()["python"]
LIMITS = Limits(wall_time_s=1.0, cpu_time_s=1, memory_bytes=256 << 20, output_bytes=1 << 20, processes=20)
WIDE = replace(LIMITS, wall_time_s=60, cpu_time_s=60)  # for honest programs, which may be slow on a busy machine
CANARY = "print(int(input()) + 1)"
DAEMON = """import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(60)
    os._exit(0)
while True: pass
"""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    made = open_sandbox(SandboxSection(slots=1))
    try:
        await made.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield made
    await made.close()


async def run(sandbox: Sandbox, code: str, stdin: bytes = b"", entry_point: str | None = None) -> RunResult:
    """Run the attack twice, then a canary, which must not be affected."""
    async with sandbox.session(Program(PYTHON, code, LIMITS, entry_point)) as session:
        await session.run(stdin)
        result = await session.run(stdin)
    async with sandbox.session(Program(PYTHON, CANARY, WIDE)) as session:
        canary = await session.run(b"41")
        assert (canary.exit, canary.exit_code, canary.stdout) == (Exit.EXITED, 0, b"42\n"), canary.stderr.decode()
    return result


async def test_no_data_is_kept_between_runs(sandbox: Sandbox) -> None:
    code = (
        "import os, sys\n"
        "print(sorted(os.listdir('/tmp')), os.environ.get('KEPT'), hasattr(sys, 'kept'), len(sys.path))\n"
        "open('/tmp/kept', 'w').write('x'); os.environ['KEPT'] = '1'; sys.kept = 1; sys.path.append('x')\n"
        "if os.fork() == 0:\n    import time; time.sleep(60)\n"
    )
    async with sandbox.session(Program(PYTHON, code, LIMITS)) as session:
        outputs = {(await session.run(b"")).stdout for _ in range(4)}
    assert len(outputs) == 1
    assert outputs.pop().startswith(b"['main.py'] None False")


async def test_a_candidate_sees_only_its_own_process(sandbox: Sandbox) -> None:
    code = "import os; print([p for p in os.listdir('/proc') if p.isdigit()] == [str(os.getpid())], os.getuid())"
    assert (await run(sandbox, code)).stdout == b"True 1000\n"


async def test_a_candidate_has_no_capability(sandbox: Sandbox) -> None:
    code = (
        "names = ('CapInh', 'CapPrm', 'CapEff', 'CapAmb', 'NoNewPrivs', 'Seccomp:')\n"
        "print([line.split()[1] for line in open('/proc/self/status') if line.startswith(names)])"
    )
    assert (await run(sandbox, code)).stdout.decode() == f"{['0' * 16] * 4 + ['1', '2']}\n"


async def test_without_root_a_candidate_cannot_change_the_limits_of_process_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without root, init has the candidate's user, so only the filter refuses."""
    monkeypatch.setattr(local, "host_is_root", lambda: False)
    code = (
        "import os, resource\nrefused = 0\n"
        "for act in (lambda: resource.prlimit(1, resource.RLIMIT_CPU, (1, 1)), lambda: os.sched_setaffinity(1, {0})):\n"
        "    try: act()\n"
        "    except PermissionError: refused += 1\n"
        "resource.prlimit(0, resource.RLIMIT_NOFILE, (64, 64)); os.sched_setaffinity(0, os.sched_getaffinity(0))\n"
        "print(refused)"
    )
    sandbox = open_sandbox(SandboxSection(slots=1))
    try:
        await sandbox.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    try:
        assert (await run(sandbox, code)).stdout == b"2\n"
    finally:
        await sandbox.close()


SOCKET_BUFFERS = """import socket
kept = []
while True:
    try: one, other = socket.socketpair()
    except OSError: break
    for end in (one, other):
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
        try:
            while True: end.send(bytes(1 << 16))
        except OSError: pass
    kept += [one, other]
print(len(kept), flush=True)
input()
"""


async def test_a_submission_that_fills_socket_buffers_gets_a_result_for_each_run(sandbox: Sandbox) -> None:
    """The kernel may kill the slot's own processes for them. Each run still ends, and none is a SandboxError."""
    program, patient = Program(PYTHON, SOCKET_BUFFERS, WIDE), Program(PYTHON, "input()", WIDE)
    async with sandbox.session(program) as session:
        exits = [(await session.run(b"\n")).exit for _ in range(3)]
    async with sandbox.with_partners(program, patient) as (first, second):
        exits += [(await first.dialogue_with(second))[0].exit for _ in range(2)]
    assert set(exits) <= {Exit.EXITED, Exit.MEMORY_LIMIT}


async def test_a_process_that_dies_before_its_first_test_is_the_candidates_failure(sandbox: Sandbox) -> None:
    """The kernel may kill it for its memory while it waits. The tests after that one run in processes of their own."""
    assert isinstance(sandbox, LocalSandbox)
    async with sandbox.session(Program(PYTHON, CANARY, WIDE)) as session:
        (waiting,) = filter(_is_candidate, _descendants(sandbox.pids()))
        os.kill(waiting, signal.SIGKILL)
        async with asyncio.timeout(60):
            while _alive(waiting):
                await asyncio.sleep(0.02)
        killed = await session.run(b"41")
        assert (killed.exit, killed.signal) == (Exit.SIGNALLED, signal.SIGKILL)
        assert (await session.run(b"41")).stdout == b"42\n"


async def test_a_killed_zygote_is_a_sandbox_error_and_the_slot_works_again() -> None:
    sandbox = open_sandbox(SandboxSection(slots=1))
    assert isinstance(sandbox, LocalSandbox)
    try:
        await sandbox.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    try:
        async with sandbox.session(Program(PYTHON, "import time; time.sleep(9)", LIMITS)) as session:
            waiting = asyncio.create_task(session.run(b""))
            await asyncio.sleep(0.1)
            os.kill(sandbox.pids()[0], signal.SIGKILL)
            with pytest.raises(SandboxError):
                await waiting
        async with sandbox.session(Program(PYTHON, CANARY, WIDE)) as session:
            assert (await session.run(b"1")).stdout == b"2\n"
        idle = sandbox.pids()[0]
        os.kill(idle, signal.SIGKILL)
        async with asyncio.timeout(60):
            while Path(f"/proc/{idle}").exists():  # until then its sandbox may still answer
                await asyncio.sleep(0.01)
        async with sandbox.session(Program(PYTHON, CANARY, WIDE)) as session:
            assert (await session.run(b"1")).stdout == b"2\n"
    finally:
        await sandbox.close()


async def test_a_zygote_killed_at_any_time_leaves_no_sandbox() -> None:
    """A sandbox whose parent is killed before it has set PR_SET_PDEATHSIG gets no signal, and must exit by itself."""
    sandbox = open_sandbox(SandboxSection(slots=1, start_limit_s=5))
    assert isinstance(sandbox, LocalSandbox)
    try:
        await sandbox.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    many = replace(LIMITS, processes=4096)  # dead processes count in the slot's group until they are reaped
    try:
        for tenth_ms in range(0, 80, 4):  # the standby sandbox is made during this time
            async with sandbox.session(Program(PYTHON, CANARY, many)) as session:
                assert (await session.run(b"1")).stdout == b"2\n"
            await asyncio.sleep(tenth_ms * 1e-4)
            async with asyncio.timeout(60):
                await sandbox._slots[0].stop()  # waits until no process has an end of its pipes
    finally:
        await sandbox.close()


def _descendants(pids: list[int]) -> list[int]:
    found = list(pids)
    for pid in found:
        children = Path(f"/proc/{pid}/task/{pid}/children")
        if children.exists():
            found += [int(child) for child in children.read_text().split()]
    return found


async def test_close_leaves_no_process_mount_or_descriptor() -> None:
    before = HostState.now()
    sandbox = open_sandbox(SandboxSection(slots=2))
    assert isinstance(sandbox, LocalSandbox)
    try:
        await sandbox.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    async with sandbox.session(Program(PYTHON, DAEMON, LIMITS)) as session:
        task = asyncio.create_task(session.run(b""))
        async with asyncio.timeout(60):
            while len(family := _descendants(sandbox.pids())) < 6:  # zygotes, inits, the candidate and its daemon
                await asyncio.sleep(0.02)
        await sandbox.close()
        with pytest.raises(SandboxError):
            await task
    async with asyncio.timeout(60):
        while any(_alive(pid) for pid in family):
            await asyncio.sleep(0.02)
    await asyncio.sleep(0)
    assert HostState.now().left_since(before) == []


def _is_candidate(pid: int) -> bool:
    """In its own namespace, init has the process id 1, and the program of the submission 2."""
    return f"NSpid:\t{pid}\t2\n" in Path(f"/proc/{pid}/status").read_text()


def _alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_the_memory_of_a_run_has_nothing_of_an_earlier_input_or_error_output(sandbox: Sandbox) -> None:
    """A process is a fork of init, which has read the input and sent the output of each run before."""
    code = (
        "import ctypes, sys\n"
        "data = sys.stdin.buffer.read()\n"
        "if data.startswith(b'keep '):\n    sys.stderr.write(data[5:].decode()); sys.exit()\n"
        "first, second = data.split()\nfound = 0\n"
        "for line in open('/proc/self/maps').readlines():\n"
        "    words = line.split()\n"
        "    if words[1][:2] != 'rw': continue\n"
        "    low, high = (int(word, 16) for word in words[0].split('-'))\n"
        "    text = ctypes.string_at(low, high - low)\n"
        "    at = text.find(first)\n"
        "    while at >= 0:\n"
        "        found += text[at + len(first) : at + len(first) + len(second)] == second\n"
        "        at = text.find(first, at + 1)\n"
        "print(found)"
    )
    first, second = b"0123456789abcdef" * 2, b"fedcba9876543210" * 2
    async with sandbox.session(Program(PYTHON, code, replace(LIMITS, wall_time_s=60, cpu_time_s=60))) as session:
        for _ in range(2):
            assert (await session.run(b"keep " + 20 * (first + second))).exit is Exit.EXITED
        result = await session.run(first + b" " + second)
    assert result.stdout == b"0\n", result.stderr.decode()


async def test_a_run_cannot_count_the_processes_of_an_earlier_run(sandbox: Sandbox) -> None:
    code = (
        "import os\nprint(os.getpid())\n"
        "for _ in range(int(input())):\n    if os.fork() == 0: os._exit(0)\n    os.wait()"
    )
    async with sandbox.session(Program(PYTHON, code, replace(LIMITS, wall_time_s=60, cpu_time_s=60))) as session:
        outputs = {(await session.run(b"%d" % number)).stdout for number in (3, 7, 0)}
    assert len(outputs) == 1


async def test_a_candidate_sees_no_path_of_the_host_in_its_command_and_group(sandbox: Sandbox) -> None:
    code = (
        "print(open('/proc/self/cmdline').read().rstrip('\\0').split('\\0'),"
        " {line.split(':')[2] for line in open('/proc/self/cgroup')} <= {'/\\n'})"
    )
    assert (await run(sandbox, code)).stdout == b"['python3', 'main.py'] True\n"


async def test_a_candidate_can_neither_watch_shared_files_nor_write_the_hosts_disks(sandbox: Sandbox) -> None:
    code = (
        "import ctypes, fcntl, os, socket\nlibc = ctypes.CDLL(None)\nroot = os.open('/usr', os.O_RDONLY)\n"
        "def refused(f):\n"
        "    try: f()\n"
        "    except OSError: return True\n"
        "def sock(kind, protocol): return lambda: socket.socket(socket.AF_INET, kind, protocol)\n"
        "print(libc.inotify_init(), libc.inotify_init1(0), libc.syncfs(root),\n"
        "    refused(lambda: fcntl.fcntl(root, fcntl.F_NOTIFY, fcntl.DN_ACCESS)),\n"
        "    refused(lambda: fcntl.fcntl(os.open('/tmp/main.py', os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK)),\n"
        "    refused(sock(socket.SOCK_STREAM, 262)), refused(sock(socket.SOCK_DGRAM, 136)))\n"
        "sock(socket.SOCK_STREAM, 0)(), sock(socket.SOCK_STREAM, 6)(), sock(socket.SOCK_DGRAM, 17)()"
    )
    result = await run(sandbox, code)
    assert (result.exit_code, result.stdout) == (0, b"-1 -1 -1 True True True True\n"), result.stderr.decode()


LOCKS = """import fcntl
kept = [open(path) for path in input().split()]
for one in kept:
    fcntl.flock(one, fcntl.LOCK_EX)
    fcntl.lockf(one, fcntl.LOCK_SH)
print('locked', flush=True)
input()
"""


async def test_locks_on_files_of_the_root_do_not_hold_for_the_host_and_other_slots() -> None:
    paths = ["/usr/bin/yes", os.__file__]
    sandbox = open_sandbox(SandboxSection(slots=2))
    try:
        await sandbox.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    try:
        async with sandbox.dialogue(Program(PYTHON, LOCKS, WIDE)) as dialogue:
            await dialogue.say(" ".join(paths).encode() + b"\n")
            assert await dialogue.hear(60.0) == b"locked\n"
            for path in paths:
                with open(path, "r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            async with sandbox.session(Program(PYTHON, LOCKS + "print('both')", WIDE)) as other:
                result = await other.run(" ".join(paths).encode() + b"\n\n")
                assert result.stdout == b"locked\nboth\n", result.stderr
    finally:
        await sandbox.close()


async def test_the_list_of_mounts_names_no_folder_and_no_device_of_the_host(sandbox: Sandbox) -> None:
    result = await run(sandbox, "print(open('/proc/self/mountinfo').read())")
    for line in filter(None, result.stdout.decode().split("\n")):
        mount, _, file_system = line.partition(" - ")
        _, _, _, root, place, *_ = mount.split()
        kind, source, options = file_system.split()
        assert root == "/" or place.startswith("/dev/"), line
        assert source in (kind, "none") or kind == "devtmpfs", line
        assert "dir=/" not in options.replace("dir=/proc/self/fd/", ""), line


async def test_a_folder_of_the_root_lists_what_it_holds(sandbox: Sandbox) -> None:
    result = await run(sandbox, "import os; print(sorted(os.listdir('/usr')))")
    assert result.stdout.decode() == f"{sorted(os.listdir('/usr'))}\n"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder outside of /tmp, which a candidate's own /tmp would hide."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        os.chmod(made, 0o755)
        yield Path(made)


async def test_a_mount_below_a_folder_of_the_root_is_visible(folder: Path) -> None:
    """The folder is then bound, because an overlay would hide what is mounted below it."""
    (folder / "below").mkdir()
    mounting = await asyncio.create_subprocess_exec("mount", "-t", "tmpfs", "none", str(folder / "below"))
    if await mounting.wait():
        pytest.skip("this process may not mount")
    try:
        (folder / "below" / "part.py").write_text("print('found')")
        sandbox = open_sandbox(SandboxSection(slots=1, site_packages=(folder,)))
        await sandbox.start()
        try:
            result = await run(sandbox, "import below.part")
            assert result.stdout == b"found\n", result.stderr
        finally:
            await sandbox.close()
    finally:
        unmounting = await asyncio.create_subprocess_exec("umount", str(folder / "below"))
        assert await unmounting.wait() == 0


NETWORK = "import os; print(os.readlink('/proc/self/ns/net'), open('/proc/self/net/unix').read().count('\\n'))"
SOCKETS = {
    "a name without a file": "s = socket.socket(socket.AF_UNIX); s.bind('\\0left'); s.listen()",
    "a pair": "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.bind('\\0left')",
    "loopback": "s = socket.create_server(('127.0.0.1', 5000))",
}


@pytest.mark.parametrize("make", SOCKETS.values(), ids=SOCKETS)
async def test_no_run_has_a_network_namespace_in_which_another_has_made_a_socket(sandbox: Sandbox, make: str) -> None:
    """Neither in the same submission, nor in the next one, whose sandbox was made before, nor in the one after it."""
    assert isinstance(sandbox, LocalSandbox)
    slot = f"/proc/{sandbox.pids()[0]}/ns/net"
    # The slot may still leave what the test before has used. A submission without sockets lets the slot keep its own.
    first = await _networks(sandbox, NETWORK)
    use = f"{NETWORK}\nimport socket, sys\nif not sys.stdin.read(): {make}"
    with open(slot):  # while it is open, no other namespace gets its number
        used = os.readlink(slot).encode()
        seen = [await _networks(sandbox, code) for code in (use, NETWORK, NETWORK)]
    assert first == 3 * [used]
    assert seen[0][0] == used
    assert used not in [*seen[0][1:], *seen[1], *seen[2]]
    assert seen[2] == 3 * [os.readlink(slot).encode()]


async def _networks(sandbox: Sandbox, code: str) -> list[bytes]:
    """The namespaces of three runs of a submission. Each must list no socket."""
    seen = []
    async with sandbox.session(Program(PYTHON, code, WIDE)) as session:
        for stdin in (b"", b"", b"only look"):
            result = await session.run(stdin)
            assert (result.exit, result.exit_code) == (Exit.EXITED, 0), result.stderr.decode()
            name, num_lines = result.stdout.split()
            assert num_lines == b"1", "sockets of another run are listed"
            seen.append(name)
    return seen


async def test_programs_without_sockets_share_a_network_namespace_that_they_cannot_change(sandbox: Sandbox) -> None:
    look = "import os; print(os.readlink('/proc/self/ns/net')); print(open('/proc/self/net/sockstat').readline())"
    outputs = set()
    for _ in range(3):
        async with sandbox.session(Program(PYTHON, look, WIDE)) as session:
            outputs |= {(await session.run(b"")).stdout for _ in range(2)}
    assert len(outputs) == 1
    assert b"sockets: used 0" in outputs.pop()


async def test_loopback_works_in_each_run_of_a_program_that_uses_it(sandbox: Sandbox) -> None:
    code = (
        "import socket\n"
        "server = socket.create_server(('127.0.0.1', 5000))\n"
        "with socket.create_connection(('127.0.0.1', 5000)) as one: one.sendall(b'by loopback')\n"
        "print(server.accept()[0].recv(100))\n"
        "server = socket.create_server(('::1', 5001), family=socket.AF_INET6)\n"
    )
    for _ in range(2):
        async with sandbox.session(Program(PYTHON, code, WIDE)) as session:
            for _ in range(3):
                result = await session.run(b"")
                assert result.stdout == b"b'by loopback'\n", result.stderr.decode()
                assert result.exit_code == 0, result.stderr.decode()


async def test_no_memory_of_a_candidate_is_both_writable_and_executable(sandbox: Sandbox) -> None:
    """The zygote's memory has been moved to large pages where the kernel has some (init/zygote.c)."""
    code = "print(*{line.split()[1] for line in open('/proc/self/maps')})"
    rights = (await run(sandbox, code)).stdout.decode().split()
    assert any("x" in each for each in rights), rights
    assert not [each for each in rights if "w" in each and "x" in each]


SMALL = {"python": "print(1)", "cpp": '#include <cstdio>\nint main() { puts("1"); }'}
LARGE = {
    "python": "print(len(bytearray(40 << 20)))",
    "cpp": "#include <vector>\nint main() { std::vector<char> v(40 << 20, 1); return v[1 << 20] - 1; }",
}


@pytest.mark.parametrize("language", SMALL)
async def test_the_memory_of_a_run_is_not_that_of_the_interpreter_that_it_is_forked_from(
    sandbox: Sandbox, language: str
) -> None:
    if language not in installed():
        pytest.skip(f"{language} is not installed")
    figures = []
    for code in (SMALL[language], LARGE[language]):
        async with sandbox.session(Program(installed()[language], code, WIDE)) as session:
            for _ in range(2):
                result = await session.run(b"")
                assert (result.exit, result.exit_code) == (Exit.EXITED, 0), result.stderr.decode()
                figures.append(result.memory_bytes)
    assert max(figures[:2]) < 14 << 20
    assert all(40 << 20 <= figure < 56 << 20 for figure in figures[2:]), figures
