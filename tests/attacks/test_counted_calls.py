"""No call of a candidate tells a number that the kernel counts for all, or keeps memory that is no process's."""

from __future__ import annotations

import ast
import os

import pytest

from nouscoder.config import SandboxSection
from nouscoder.domain.submission import Limits
from nouscoder.verifier.sandbox import Program, SandboxUnavailable, open_sandbox
from nouscoder.verifier.toolchains.languages import registry

CODE = """
import asyncio, ctypes, fcntl, os, socket, subprocess
libc = ctypes.CDLL(None, use_errno=True)
got = {}
def tried(name, call):
    try:
        got[name] = call() >= 0
    except OSError:
        got[name] = False
fd = lambda number, *args: libc.syscall(number, *args)
tried("pidfd_open", lambda: fd(434, os.getpid(), 0))
tried("pidfd_send_signal", lambda: fd(424, 0, 0, 0, 0))
def clone():
    room = ctypes.c_int(-1)
    child = fd(CLONE, 0x1000 | 17, 0, ctypes.byref(room), 0, 0)
    if child == 0:
        os._exit(0)
    return child
tried("clone with CLONE_PIDFD", clone)
one, other = socket.socketpair()
tcp = socket.socket()
for name, option in (("SO_PEERPIDFD", 77), ("SO_COOKIE", 57)):
    tried(name, lambda: one.getsockopt(1, option, 8) and 1)
tried("SO_PASSPIDFD", lambda: one.setsockopt(1, 76, 1) or 1)
tried("SO_NETNS_COOKIE", lambda: tcp.getsockopt(1, 71, 8) and 1)
for kind in ("mnt", "pid", "net"):
    space = os.open(f"/proc/self/ns/{kind}", os.O_RDONLY)
    for request in (0x8008B705, 0x8008B70D, 0x8010B70A):
        tried(f"{kind} {request:x}", lambda: fcntl.ioctl(space, request, bytes(16)) and 1)
read, write = os.pipe()
read2, write2 = os.pipe()
os.write(write, b"x")
room = ctypes.create_string_buffer(4096)
piece = (ctypes.c_size_t * 2)(ctypes.addressof(room), 4096)
tried("vmsplice", lambda: fd(VMSPLICE, write, piece, 1, 0))
tried("tee", lambda: fd(TEE, read, write2, 1, 0))
async def child():
    made = await asyncio.create_subprocess_exec("/bin/true")
    return await made.wait()
works = [asyncio.run(child()), subprocess.run(["/bin/true"]).returncode, one.getsockopt(1, 4), fcntl.fcntl(0, 1)]
print([name for name, yes in got.items() if yes], works)
"""
NUMBERS = {"CLONE": (56, 220), "VMSPLICE": (278, 75), "TEE": (276, 77)}


async def test_no_call_tells_a_number_of_the_host_or_keeps_memory_in_pipes() -> None:
    code = CODE
    for name, both in NUMBERS.items():
        code = code.replace(f"({name}", f"({both[os.uname().machine != 'x86_64']}")
    sandbox = open_sandbox(SandboxSection(backend="local", slots=1))
    try:
        await sandbox.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    async with sandbox.session(Program(registry()["python"], code, Limits(wall_time_s=20, cpu_time_s=20))) as session:
        result = await session.run(b"")
    await sandbox.close()
    told, works = ast.literal_eval(result.stdout.decode().replace("] [", "], [") or f"'', {result.stderr!r}")
    assert told == []
    assert works[:3] == [0, 0, 0]
