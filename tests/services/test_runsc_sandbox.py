"""The `runsc` backend's invariant: a gVisor sandbox serves a bounded number of submissions, and none after an error."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nouscoder.config import SandboxSection
from nouscoder.domain.submission import Limits
from nouscoder.verifier.sandbox import Exit, Program, SandboxError, SandboxUnavailable
from nouscoder.verifier.sandbox.runsc import HOW_TO_GET, RunscSandbox, find_runsc
from nouscoder.verifier.toolchains.languages import registry

LIMITS = Limits(wall_time_s=20.0, cpu_time_s=10.0, memory_bytes=256 << 20, output_bytes=1 << 20)
DOUBLE = Program(registry()["python"], "print(int(input()) * 2)", LIMITS)
SLEEP = Program(registry()["python"], "import time; time.sleep(60)", LIMITS)


@pytest.fixture
async def sandbox(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[RunscSandbox]:
    """One slot with two submissions per gVisor sandbox. Its bundles are the only files in `tmp_path`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    try:
        made = RunscSandbox(SandboxSection(backend="runsc", slots=1, max_sessions=2))
        await made.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield made
    await made.close()
    assert list(tmp_path.iterdir()) == []


async def doubled(sandbox: RunscSandbox) -> int:
    """Run one program. Returns the pid of its sandbox."""
    async with sandbox.session(DOUBLE) as session:
        pid = sandbox.pids()[0]
        assert (await session.run(b"21")).stdout == b"42\n"
    return pid


async def test_a_sandbox_is_replaced_after_its_submissions(sandbox: RunscSandbox) -> None:
    pids = [await doubled(sandbox) for _ in range(5)]
    assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]


async def test_a_sandbox_that_dies_is_a_sandbox_error_and_is_replaced(sandbox: RunscSandbox) -> None:
    async with sandbox.session(SLEEP) as session:
        (pid,) = sandbox.pids()
        waiting = asyncio.create_task(session.run(b""))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SandboxError):
            await waiting
    assert await doubled(sandbox) != pid


IN_FILES = """
import time
def fill(mebibytes):
    for number in range(mebibytes):
        with open(f"/tmp/{number}", "wb") as file:
            file.write(b"x" * (1 << 20))
    return [bytearray(b"x" * (1 << 20)) for _ in range(180)]
"""
IN_NOBODYS_PAGES = """
import mmap, os, time
def fill(mebibytes):
    r, w = os.pipe()
    if os.fork() == 0:  # holds a mapping that another process, now dead, has filled
        held = mmap.mmap(-1, mebibytes << 20)
        if os.fork() == 0:
            for at in range(0, mebibytes << 20, 4096):
                held[at] = 1
            os._exit(0)
        os.wait()
        os.write(w, b"x")
        time.sleep(60)
    os.read(r, 1)
    return [bytearray(b"x" * (1 << 20)) for _ in range(180)]
"""


@pytest.mark.parametrize("fills", [IN_FILES, IN_NOBODYS_PAGES])
async def test_what_no_process_counts_is_memory_of_the_run(sandbox: RunscSandbox, fills: str) -> None:
    """The last run of a session is one that starts while the sandbox has just freed what the run before held."""
    bomb = Program(registry()["python"], f"{fills}\nkept = fill(int(input()))\ntime.sleep(60)", LIMITS)
    async with sandbox.session(bomb) as session:
        for _ in range(3):
            result = await session.run(b"200")
            assert (result.exit, result.memory_bytes > LIMITS.memory_bytes) == (Exit.MEMORY_LIMIT, True), result


@pytest.mark.parametrize("fills", [IN_FILES, IN_NOBODYS_PAGES])
async def test_a_run_below_its_limit_may_use_files_and_shared_mappings(sandbox: RunscSandbox, fills: str) -> None:
    honest = f"{fills}\nkept = fill(int(input()))\ntime.sleep(0.2)\nprint(len(kept))"  # measured a few times
    async with sandbox.session(Program(registry()["python"], honest, LIMITS)) as session:
        for _ in range(3):
            result = await session.run(b"40\n" + b"x" * (16 << 20))
            assert (result.exit, result.stdout) == (Exit.EXITED, b"180\n"), result


TALKS = """
import os, socket
print([line.split()[1] for line in open("/proc/net/dev") if "lo:" in line], os.listdir("/proc/1"))
server = socket.create_server(("127.0.0.1", 5000))
client = socket.create_connection(("127.0.0.1", 5000))
there, _ = server.accept()
client.send(b"x")
print(there.recv(1))
there.close()
"""


async def test_loopback_works_and_no_run_sees_that_another_has_used_it(sandbox: RunscSandbox) -> None:
    """The port of the earlier run, which waits after its end, is free too."""
    for _ in range(2):
        async with sandbox.session(Program(registry()["python"], TALKS, LIMITS)) as session:
            for _ in range(3):
                result = await session.run(b"")
                assert (result.stdout, result.stderr) == (b"['0'] []\nb'x'\n", b"")


async def test_the_isolation_layers_are_named(sandbox: RunscSandbox) -> None:
    assert sandbox.isolation[0] == "gvisor:systrap"
    assert "namespace:user" not in sandbox.isolation


def test_without_runsc_it_says_how_to_get_it() -> None:
    with pytest.raises(SandboxUnavailable, match="build-runsc") as caught:
        RunscSandbox(SandboxSection(backend="runsc", slots=1, runsc="/nowhere/runsc"))
    assert HOW_TO_GET in str(caught.value)


def test_runsc_is_found_where_it_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_runsc() is None
    program = tmp_path / "nouscoder" / "bin" / "runsc"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert find_runsc() == program
