"""What a program sees of its run tells nothing about the other runs: not how many there were, nor their files' names.

Tests the invariant of harness/init/folder.c. A run that knows its number could know which answer is next.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from typing import Any

import pytest
from tests.contract.test_sandbox_contract import PYTHON, WIDE, sandbox

from nouscoder.config.verifier import SandboxSection
from nouscoder.verifier.sandbox import Program, Sandbox, SandboxUnavailable, open_sandbox
from nouscoder.verifier.sandbox.fake import FakeSandbox
from nouscoder.verifier.toolchains.languages import installed

__all__ = ["sandbox"]  # the fixture of all backends

# Everything that is the same in each process, without times, and without the ids of mounts and devices: the host lends
# each of these numbers again after its end, so they count nothing.
LOOK = r"""
import ctypes, json, os, re, socket, sys, threading

def about(path):
    s = os.stat(path, follow_symlinks=False)
    return [s.st_mode, s.st_ino, s.st_nlink, s.st_uid, s.st_gid, s.st_size, s.st_blocks]

def text(path):
    try:
        return open(path).read()
    except OSError as error:
        return error.errno

def made(path):
    with open(path, "w"):
        return about(path)

seen = {}
for fd in range(3):
    s = os.fstat(fd)
    seen[f"descriptor {fd}"] = [s.st_mode, s.st_ino, s.st_nlink, s.st_uid, os.lseek(fd, 0, os.SEEK_CUR)]
    seen[f"link {fd}"] = os.readlink(f"/proc/self/fd/{fd}")
    seen[f"fdinfo {fd}"] = re.sub("mnt_id:.*", "", text(f"/proc/self/fdinfo/{fd}"))
seen["next descriptor"] = os.dup(0)
seen["folder"] = {name: about(f"/tmp/{name}") for name in sorted(os.listdir("/tmp"))}
seen["/tmp"] = about("/tmp")
seen["/program"] = about("/program")
seen["new files"] = [made("/tmp/a"), made("/tmp/b")]
seen["space"] = [getattr(os.statvfs("/tmp"), name) for name in ("f_files", "f_ffree", "f_blocks")]
seen["process"] = [os.getpid(), os.getppid(), os.getpgrp(), os.getsid(0), threading.get_native_id()]
seen["processes"] = sorted(name for name in os.listdir("/proc") if name.isdigit())
seen["mounts"] = re.sub(r"(?m)^\d+ \d+ \d+:\d+", "", text("/proc/self/mountinfo"))
seen["limits"] = text("/proc/self/limits")
seen["child"] = os.fork() or os._exit(0)
os.wait()
room = (ctypes.c_char * 256)()
unique = ctypes.CDLL(None, use_errno=True).syscall(STATX, -100, b"/tmp", 0, 0x4000, room)
mask = int.from_bytes(bytes(room)[:4], "little")
seen["unique number of a mount"] = bytes(room)[144:152].hex() if not unique and mask & 0x4000 else None
print(json.dumps(seen))
"""
LOOK = LOOK.replace("STATX", "332" if os.uname().machine == "x86_64" else "291")
LEAVES_FILES = LOOK + "os.makedirs('/tmp/x/y'); open('/tmp/x/z', 'w').write('1'); os.chmod('/tmp', 0o700)\n"
SHELL = r"""
stat -L -c '%n %i %f %h' /dev/fd/0 /tmp /tmp/* /program /program/*
stat -c '%n %i %f %h' /tmp/*
touch /tmp/new
stat -c '%i' /tmp/new
readlink /proc/self/fd/0
sed -E 's/^[0-9]+ [0-9]+ [0-9:]+//' /proc/$$/mountinfo
echo $$
"""


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (one[name], other[name]) for name in one if one[name] != other[name]}


def has_own_numbers(sandbox: Sandbox) -> bool:
    """gVisor has no file that sets the next process id, so the ids of a submission's processes go on."""
    return sandbox.name == "local"


@pytest.mark.parametrize("code", [LOOK, LEAVES_FILES], ids=["looks", "leaves files"])
async def test_two_runs_look_the_same(sandbox: Sandbox, code: str) -> None:
    """Before, each run's stdin had an inode number 3 above that of the run before, and a new file in /tmp 1."""
    if isinstance(sandbox, FakeSandbox):
        pytest.skip("the fake backend runs nothing")
    async with sandbox.session(Program(PYTHON, code, WIDE, files={"data": b"1"})) as session:
        results = [await session.run(b"x" * size) for size in (1, 1, 5000, 0)]
    runs = [json.loads(result.stdout or result.stderr) for result in results]
    for run in runs:
        if not has_own_numbers(sandbox):
            del run["process"], run["processes"], run["child"]
    for run in runs[1:]:
        assert differences(runs[0], run) == {}
    assert runs[0]["unique number of a mount"] is None


async def test_two_runs_of_a_command_look_the_same(sandbox: Sandbox) -> None:
    if isinstance(sandbox, FakeSandbox) or not has_own_numbers(sandbox):
        pytest.skip(f"{sandbox.name} runs nothing, or goes on with process ids")
    async with sandbox.session(Program(installed()["bash"], SHELL, WIDE)) as session:
        outputs = [(await session.run(b"x" * size)).stdout for size in (1, 1, 5000, 0)]
    assert len(set(outputs)) == 1, outputs
    assert outputs[0].count(b"\n") > 10


async def test_the_files_of_a_run_are_new_in_each_run(sandbox: Sandbox) -> None:
    """Their times tell when the run began, not when the submission did."""
    if isinstance(sandbox, FakeSandbox):
        pytest.skip("the fake backend runs nothing")
    code = (
        "import json, os, time\n"
        "found = [os.stat(path).st_ctime for path in ('/tmp', '/tmp/main.py', '/dev/stdin')]\n"
        "time.sleep(0.2)\nprint(json.dumps([found, time.time()]))"
    )
    async with sandbox.session(Program(PYTHON, code, WIDE)) as session:
        runs = [json.loads((await session.run(b"")).stdout) for _ in range(3)]
    for (_, ended_s), (times_s, _) in itertools.pairwise(runs):
        assert min(times_s) >= ended_s - 0.1, "the kernel's clock for files goes in steps of some milliseconds"


async def test_a_users_file_may_have_any_name_that_a_compiler_gives(sandbox: Sandbox) -> None:
    """Before, a run with a file `main` failed: "slot 0: /tmp/main: File exists"."""
    if isinstance(sandbox, FakeSandbox):
        pytest.skip("the fake backend runs nothing")
    code = """
#include <stdio.h>
int main(int argc, char **argv) {
    char text[99] = "";
    for (int i = 1; i < argc; i++) { FILE *f = fopen(argv[i], "r"); if (f) fgets(text, 99, f), printf("%s ", text); }
}
"""
    args = ("main", "made", "a.out")
    of_program = Program(installed()["c"], code, WIDE, files={"main": b"main"})
    for program, files in ((of_program, ("made", "a.out")), (replace(of_program, files={}), ("main", "made", "a.out"))):
        async with sandbox.session(program) as session:
            for _ in range(2):
                result = await session.run(b"", args=args, files={name: name.encode() for name in files})
                assert (result.stdout, result.stderr) == (b"main made a.out ", b"")


async def test_an_input_takes_no_room_from_what_the_program_may_write() -> None:
    """They are in one file system, which also holds an input larger than `tmp_bytes`. Output takes room in it."""
    made = open_sandbox(SandboxSection(slots=1, tmp_bytes=2 << 20))
    code = (
        "import os, sys\nsize = len(sys.stdin.buffer.read())\n"
        "try:\n    for number in range(8):\n        with open(f'/tmp/{number}', 'wb') as file:\n"
        "            file.write(bytes(1 << 19))\n"
        "except OSError as error:\n    os.truncate('/tmp/0', 0)\n    print(size, number, error.strerror)\n"
    )
    try:
        await made.start()
        async with made.session(Program(PYTHON, code, WIDE)) as session:
            outputs = [(await session.run(b"x" * size)).stdout for size in (5 << 20, 5)]
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    finally:
        await made.close()
    assert outputs == [b"%d 3 No space left on device\n" % size for size in (5 << 20, 5)], "2 MiB with the source"
