"""Hostile programs against the `local` sandbox: each is contained, and a canary is graded right after each."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from nouscoder.submission import Limits
from nouscoder.verifier.languages import registry
from nouscoder.verifier.sandbox import (
    CompileFailed,
    Exit,
    Program,
    RunResult,
    Sandbox,
    SandboxConfig,
    SandboxError,
    SandboxUnavailable,
    open_sandbox,
)
from nouscoder.verifier.sandbox.local import LocalSandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")
PYTHON = registry()["python"]
LIMITS = Limits(wall_time_s=1.0, cpu_time_s=1, memory_bytes=256 << 20, output_bytes=1 << 20, processes=20)
CANARY = "print(int(input()) + 1)"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    made = open_sandbox(SandboxConfig(slots=1))
    try:
        await made.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield made
    await made.close()


async def run(sandbox: Sandbox, code: str, stdin: bytes = b"", entry_point: str | None = None) -> RunResult:
    """Two runs of the attack, then the canary, which must not notice."""
    async with sandbox.session(Program(PYTHON, code, LIMITS, entry_point)) as session:
        await session.run(stdin)
        result = await session.run(stdin)
    async with sandbox.session(Program(PYTHON, CANARY, LIMITS)) as session:
        canary = await session.run(b"41")
        assert (canary.exit, canary.exit_code, canary.stdout) == (Exit.EXITED, 0, b"42\n"), canary.stderr.decode()
    return result


# Each prints "held" when what it tried was refused, and "escaped" otherwise.
TRY = (
    "def attempt(f, *a):\n    try: f(*a)\n    except (OSError, ValueError): return print('held')\n"
    "    print('escaped')\n"
)
REFUSED = {
    "read /etc/shadow": "attempt(open, '/etc/shadow')",
    "read the service's files": "attempt(open, '/work/main/pyproject.toml')",
    "list the home of root beyond the interpreter": "attempt(open, '/root/.bashrc')",
    "list /run": "import os; attempt(os.listdir, '/run')",
    "write to the root": "attempt(open, '/x', 'w')",
    "write to /usr": "attempt(open, '/usr/x', 'w')",
    "write to /dev": "attempt(open, '/dev/x', 'w')",
    "write to the interpreter": "import sys; attempt(open, sys.prefix + '/x', 'w')",
    "rewrite its own script": "attempt(open, '/tmp/main.py', 'w')",
    "read init's memory": "attempt(open, '/proc/1/mem', 'rb')",
    "read init's environment": "attempt(open, '/proc/1/environ', 'rb')",
    "list init's descriptors": "import os; attempt(os.listdir, '/proc/1/fd')",
    "enter init's root": "import os; attempt(os.listdir, '/proc/1/root')",
    "kernel logs": "attempt(open, '/proc/kmsg')",
    "sysctl": "attempt(open, '/proc/sys/kernel/core_pattern', 'w')",
    "kill init": "import os; attempt(os.kill, 1, 9)",
    "stop init": "import os; attempt(os.kill, 1, 19)",
    "kill everybody": "import os; attempt(os.kill, -1, 9)",
    "become root": "import os; attempt(os.setuid, 0)",
    "chroot": "import os; attempt(os.chroot, '/tmp')",
    "make a device": "import os, stat; attempt(os.mknod, '/tmp/d', stat.S_IFBLK | 0o666, os.makedev(254, 0))",
    "shared memory past its limits": "import os; attempt(os.memfd_create, 'x')",
    "raise a limit": "import resource as r; attempt(r.setrlimit, r.RLIMIT_NPROC, (999, 999))",
    "raise its priority": "import os; attempt(os.nice, -5)",
    "reach the network": "import socket; attempt(socket.create_connection, ('192.0.2.1', 80), 0.5)",
    "reach the metadata address": "import socket; attempt(socket.create_connection, ('169.254.169.254', 80), 0.5)",
    "reach loopback": "import socket; attempt(socket.create_connection, ('127.0.0.1', 22), 0.5)",
    "resolve a name": "import socket; attempt(socket.gethostbyname, 'example.org')",
    "netlink": "import socket; attempt(socket.socket, 16, 3, 0)",
    "vsock": "import socket; attempt(socket.socket, 40, 1, 0)",
    "raw packets": "import socket; attempt(socket.socket, 2, 3, 1)",
    "inherited descriptors": "import os\nfor fd in range(3, 200): attempt(os.fstat, fd)\n"
    "assert all(not os.path.exists(f'/proc/self/fd/{fd}') for fd in range(4, 200))",
    "control stream": "import os; attempt(os.write, 64, b'x'); attempt(os.write, 65, b'x')",
    "tty injection": "import fcntl; attempt(fcntl.ioctl, 0, 0x5412, b'x')",
}
SYSCALLS = {
    "ptrace": "101, 0, 0, 0, 0",
    "unshare user": "272, 0x10000000",
    "clone into a user namespace": "56, 0x10000011, 0, 0, 0, 0",
    "setns": "308, 0, 0",
    "mount": "165, b'none', b'/tmp', b'tmpfs', 0, 0",
    "umount": "166, b'/tmp', 2",
    "pivot_root": "155, b'/tmp', b'/tmp'",
    "open_tree": "428, -100, b'/', 1",
    "fsopen": "430, b'tmpfs', 0",
    "bpf": "321, 0, 0, 0",
    "io_uring": "425, 8, 0",
    "userfaultfd": "323, 0",
    "perf_event_open": "298, 0, 0, -1, -1, 0",
    "keyctl": "250, 0, -3, 0",
    "process_vm_readv": "310, 1, 0, 0, 0, 0, 0",
    "shmget": "29, 0, 4096, 0o1600",
    "msgget": "68, 0, 0o1600",
    "semget": "64, 0, 1, 0o1600",
    "kexec": "246, 0, 0, 0, 0",
    "reboot": "169, 0xfee1dead, 672274793, 0, 0",
    "init_module": "175, 0, 0, b''",
    "personality": "135, 0x0040000",
    "pidfd_getfd": "438, 0, 0, 0",
    "bigger host name": "170, b'x', 1",
}


@pytest.mark.parametrize("name", REFUSED)
async def test_refused(sandbox: Sandbox, name: str) -> None:
    result = await run(sandbox, TRY + REFUSED[name])
    assert b"held" in result.stdout, result.stderr.decode()
    assert b"escaped" not in result.stdout


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="call numbers of x86_64")
@pytest.mark.parametrize("name", SYSCALLS)
async def test_system_call_refused(sandbox: Sandbox, name: str) -> None:
    code = f"import ctypes; print(ctypes.CDLL(None).syscall({SYSCALLS[name]}))"
    result = await run(sandbox, code)
    assert (result.exit_code, result.stdout) == (0, b"-1\n"), result.stderr.decode()


LIMITED = {
    "endless loop": ("while True: pass", Exit.TIME_LIMIT),
    "sleep": ("import time; time.sleep(60)", Exit.TIME_LIMIT),
    "ignoring signals": (
        "import signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "while True: pass",
        Exit.TIME_LIMIT,
    ),
    "swallowing everything": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        Exit.TIME_LIMIT,
    ),
    "stopping itself": ("import os; os.kill(os.getpid(), 19)", Exit.TIME_LIMIT),
    "heap bomb": ("a = []\nwhile True: a.append(bytearray(1 << 22))", Exit.MEMORY_LIMIT),
    "mmap bomb": ("import mmap; m = mmap.mmap(-1, 1 << 34)", Exit.MEMORY_LIMIT),
    "many children share the bomb": (
        "import os, time\nfor _ in range(9):\n    if os.fork() == 0: break\n"
        "a = []\nfor _ in range(40):\n    a.append(b'x' * (1 << 20)); time.sleep(0.004)\ntime.sleep(9)",
        Exit.MEMORY_LIMIT,
    ),
    "int bomb": ("x = 1 << (1 << 33)", Exit.MEMORY_LIMIT),
    "stdout flood": ("while True: print('x' * 10000)", Exit.OUTPUT_LIMIT),
    "stderr flood": ("import sys\nwhile True: sys.stderr.write('x' * 10000)", Exit.OUTPUT_LIMIT),
    "one-line flood": ("import os\nwhile True: os.write(1, b'x' * 65536)", Exit.OUTPUT_LIMIT),
    "sparse output": ("import os\nos.ftruncate(1, (1 << 20) + 1)", Exit.OUTPUT_LIMIT),
    "right answer then blanks": (
        "print(42)\nimport os\nfor _ in range(99): os.write(1, b' ' * 100000)",
        Exit.OUTPUT_LIMIT,
    ),
    "child burns the time": (
        "import os\nfor _ in range(3):\n    if os.fork() == 0:\n        while True: pass\nos.wait()",
        Exit.TIME_LIMIT,
    ),
}


@pytest.mark.parametrize("name", LIMITED)
async def test_limit(sandbox: Sandbox, name: str) -> None:
    code, expected = LIMITED[name]
    assert (await run(sandbox, code)).exit is expected


CONTAINED = {
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "thread bomb": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,)).start()",
    "daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)\n"
    "    os._exit(0)",
    "many orphans": "import os, time\nfor _ in range(15):\n    if os.fork() == 0: time.sleep(60)\nos._exit(0)",
    "file fill": "f = open('big', 'wb')\nwhile True: f.write(b'x' * 1000000)",
    "many files": "for i in range(10**6): open(f'f{i}', 'w').close()",
    "deep folders": "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')",
    "fifo as a file": "import os; os.mkfifo('/tmp/f')",
    "links": "import os; os.symlink('/etc/shadow', '/tmp/l'); os.symlink('/tmp', '/tmp/t')",
    "unreadable folder": "import os; os.mkdir('/tmp/d', 0); os.chmod('/tmp/d', 0)",
    "recursion in C": "import sys; sys.setrecursionlimit(10**9)\nclass A:\n"
    "    def __getattr__(self, n): return getattr(self, n + 'x')\nA().y",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "poisoned builtins": "import builtins; builtins.open = builtins.len = builtins.exec = None",
    "walking frames": "import sys\nf = sys._getframe()\nwhile f:\n    g, f = f, f.f_back\ng.f_globals.clear()",
    "gc walk": "import gc\nfor o in gc.get_objects():\n    if type(o) is dict: o.pop('x', None)",
    "NUL bytes": "import os; os.write(1, b'\\x00' * 1000)",
    "signals to its group": "import os; os.kill(0, 9)",
    "closed streams": "import os\nfor fd in range(3): os.close(fd)",
    "forged frames": "import os, struct\nfor fd in range(256):\n"
    "    try: os.write(fd, struct.pack('!BI', 20, 0) * 50)\n    except OSError: pass",
}


@pytest.mark.parametrize("name", CONTAINED)
async def test_contained(sandbox: Sandbox, name: str) -> None:
    result = await run(sandbox, CONTAINED[name])
    assert result.wall_time_s < 3


async def test_nothing_is_kept_between_runs(sandbox: Sandbox) -> None:
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


async def test_only_its_own_process_is_visible(sandbox: Sandbox) -> None:
    code = "import os; print([p for p in os.listdir('/proc') if p.isdigit()] == [str(os.getpid())], os.getuid())"
    assert (await run(sandbox, code)).stdout == b"True 1000\n"


async def test_no_capability_is_left(sandbox: Sandbox) -> None:
    code = (
        "names = ('CapInh', 'CapPrm', 'CapEff', 'CapAmb', 'NoNewPrivs', 'Seccomp:')\n"
        "print([line.split()[1] for line in open('/proc/self/status') if line.startswith(names)])"
    )
    assert (await run(sandbox, code)).stdout.decode() == f"{['0' * 16] * 4 + ['1', '2']}\n"


@pytest.mark.parametrize("code", ["(" * 100_000, "x = " + "-" * 200_000 + "1", "a" * 10**6 + "(", "'" + "\\N{x}" * 9])
async def test_hostile_source_is_a_compile_error(sandbox: Sandbox, code: str) -> None:
    with pytest.raises(CompileFailed):
        await run(sandbox, code)
    assert (await run(sandbox, CANARY, b"1")).stdout == b"2\n"


async def test_a_killed_zygote_is_a_sandbox_error_and_the_slot_comes_back() -> None:
    sandbox = open_sandbox(SandboxConfig(slots=1))
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
        async with sandbox.session(Program(PYTHON, CANARY, LIMITS)) as session:
            assert (await session.run(b"1")).stdout == b"2\n"
        os.kill(sandbox.pids()[0], signal.SIGKILL)  # while idle
        async with sandbox.session(Program(PYTHON, CANARY, LIMITS)) as session:
            assert (await session.run(b"1")).stdout == b"2\n"
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
    before = (Path("/proc/mounts").read_text(), len(os.listdir("/proc/self/fd")))
    sandbox = open_sandbox(SandboxConfig(slots=2))
    assert isinstance(sandbox, LocalSandbox)
    try:
        await sandbox.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    async with sandbox.session(Program(PYTHON, CONTAINED["daemon"] + "\nwhile True: pass", LIMITS)) as session:
        task = asyncio.create_task(session.run(b""))
        await asyncio.sleep(0.2)
        family = _descendants(sandbox.pids())
        assert len(family) >= 6  # two zygotes, two inits, the candidate and its daemon
        await sandbox.close()
        with pytest.raises(SandboxError):
            await task
    async with asyncio.timeout(5):
        while any(_alive(pid) for pid in family):
            await asyncio.sleep(0.02)
    await asyncio.sleep(0)
    assert (Path("/proc/mounts").read_text(), len(os.listdir("/proc/self/fd"))) == before


def _alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
