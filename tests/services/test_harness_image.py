"""The interpreter's memory that candidates in gVisor get from a file: which mappings, and that runs do not share it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from nouscoder.config import SandboxSection
from nouscoder.domain.submission import Limits
from nouscoder.verifier.harness.init_library import writable_parts
from nouscoder.verifier.sandbox import Program, RunResult, SandboxUnavailable
from nouscoder.verifier.sandbox.runsc import RunscSandbox
from nouscoder.verifier.toolchains.languages import registry

LIMITS = Limits(wall_time_s=60.0, cpu_time_s=30.0, memory_bytes=256 << 20, processes=16)

MAPS = """\
55d0c0000000-55d0c0010000 r-xp 00000000 08:01 10 /usr/bin/python3
55d0c0010000-55d0c0011000 rw-p 00010000 08:01 10 /usr/bin/python3
55d0c1000000-55d0c1200000 rw-p 00000000 00:00 0 [heap]
7f0000000000-7f0000100000 rw-p 00000000 00:00 0
7f0000100000-7f0000200000 rw-p 00000000 00:00 0
7f0000300000-7f0000400000 rw-s 00000000 00:01 3 /memfd:memory (deleted)
7f0000500000-7f0000520000 rw-p 00000000 08:01 12 /usr/lib/init.so
7fff00000000-7fff00800000 rw-p 00000000 00:00 0 [stack]
"""

FORKS = """
import os, threading
values = list(range(1000))
def in_child(work):
    there, back = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(back, repr(work()).encode())
        os._exit(0)
    os.close(back)
    assert os.waitpid(pid, 0)[1] == 0
    return os.read(there, 1000).decode()
def change():
    values[:] = [7] * 1000
    return sum(values)
"""
ALONE = """
def change_below():
    return in_child(change), sum(values)
print(in_child(change), sum(values), flush=True)
print(in_child(change_below), sum(values), flush=True)
there, back = os.pipe()
pid = os.fork()
if pid == 0:
    os.read(there, 1)
    print(sum(values), flush=True)
    os._exit(0)
values = [1]
garbage = [bytes(100) for _ in range(10000)]
os.write(back, b"x")
os.waitpid(pid, 0)
import multiprocessing, subprocess
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(abs, [-1, -2, -3]))
print(subprocess.run(["echo", "run"], stdout=subprocess.PIPE, preexec_fn=change).stdout, sum(values))
"""
ALONE_GIVES = """\
7000 499500
('7000', 499500) 499500
499500
[1, 2, 3]
b'run\\n' 1
"""
WITH_THREADS = """
results, running = [], True
def grow():
    while running: values.append(values.pop())
grower = threading.Thread(target=grow)
grower.start()
threads = [threading.Thread(target=lambda: results.append(in_child(change))) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
running = False
grower.join()
print(results, sum(values), in_child(change), sum(values))
"""
WITH_THREADS_GIVES = "['7000', '7000', '7000'] 499500 7000 499500\n"

LEAVES_A_MARK = """
import ctypes
mark = bytes.fromhex("6e6f7573")[::-1] + b"-left-behind"
def parts():
    for line in open("/proc/self/maps"):
        place, rights = line.split()[:2]
        if rights.startswith("rw") and "stack" not in line:
            yield [int(number, 16) for number in place.split("-")]
found = sum(ctypes.string_at(start, end - start).count(mark * 2) for start, end in parts())
print("found", found)
kept = [mark * 64 for _ in range(20000)]
import types
hidden = ctypes.create_string_buffer(mark * 64)
"""


def test_large_private_writable_mappings_are_parts_but_not_the_stack_and_the_librarys_own() -> None:
    heap, anonymous = (0x55D0C1000000, 0x200000), (0x7F0000000000, 0x200000)
    assert writable_parts(MAPS, not_at=0x7F0000510000) == [heap, anonymous]


def test_the_mapping_of_the_library_is_a_part_only_where_it_is_not_excluded() -> None:
    assert (0x7F0000500000, 0x20000) in writable_parts(MAPS, not_at=0)


# Chunks that fit into the heap, because larger ones have mappings of their own.
HEAP = """
import ctypes
from nouscoder.verifier.harness import kernel

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]


def heap_end():
    return next(line.split("-")[1].split()[0] for line in open("/proc/self/maps") if "[heap]" in line)


kernel.fix_heap_end()
chunks = [libc.malloc(100_000) for _ in range(50)]
before = heap_end()
for chunk in reversed(chunks):
    libc.free(chunk)
print(before == heap_end())
"""


def test_frees_do_not_unmap_memory_that_is_part_of_the_image() -> None:
    """A program of 600 kB made init free a large chunk: the heap shrank, and no test could get its memory."""
    done = subprocess.run([sys.executable, "-c", HEAP], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "True\n"


@pytest.fixture
async def sandbox() -> AsyncIterator[RunscSandbox]:
    try:
        made = RunscSandbox(SandboxSection(backend="runsc", slots=1))
        await made.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield made
    await made.close()


async def outputs(sandbox: RunscSandbox, code: str, limits: Limits = LIMITS, num_runs: int = 2) -> list[RunResult]:
    async with sandbox.session(Program(registry()["python"], code, limits)) as session:
        return [await session.run(b"") for _ in range(num_runs)]


@pytest.mark.parametrize(
    ("code", "expected"),
    [(ALONE, ALONE_GIVES), (WITH_THREADS, WITH_THREADS_GIVES)],
    ids=["one thread", "several threads"],
)
async def test_forks_of_a_program_do_not_share_its_memory(sandbox: RunscSandbox, code: str, expected: str) -> None:
    for result in await outputs(sandbox, FORKS + code):
        assert (result.stdout.decode(), result.stderr) == (expected, b"")


async def test_no_memory_of_a_run_is_in_the_next_one(sandbox: RunscSandbox) -> None:
    for _ in range(2):
        results = await outputs(sandbox, LEAVES_A_MARK, num_runs=3)
        assert [(result.stdout, result.stderr) for result in results] == [(b"found 0\n", b"")] * 3
