"""The invariant of runsc_folders: the next start removes the folders of killed services and keeps those of others."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nouscoder.config import SandboxSection
from nouscoder.verifier.sandbox import SandboxUnavailable
from nouscoder.verifier.sandbox.runsc import RunscSandbox, new_folder, sweep

RUN_FOR_EVER = """
import asyncio
from nouscoder.config import SandboxSection
from nouscoder.verifier.sandbox.runsc import RunscSandbox
async def main():
    await RunscSandbox(SandboxSection(backend="runsc", slots=1)).start()
    print("up", flush=True)
    await asyncio.sleep(300)
asyncio.run(main())
"""


def dead_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def test_only_folders_of_ended_services_of_this_pid_namespace_are_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    alive = new_folder()
    prefix, namespace, pid, rest = alive.name.rsplit("-", 3)
    assert pid == str(os.getpid())
    dead = tmp_path / f"{prefix}-{namespace}-{dead_pid()}-{rest}"
    elsewhere = tmp_path / f"{prefix}-1-{dead_pid()}-{rest}"
    link = tmp_path / f"{prefix}-{namespace}-{dead_pid()}-link"
    for folder in (dead, elsewhere):
        (folder / "state").mkdir(parents=True)
    link.symlink_to(elsewhere)
    assert sweep(Path("/bin/true")) == [dead]
    assert sorted(tmp_path.iterdir()) == sorted([alive, elsewhere, link])


def test_a_sweep_works_when_runsc_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = new_folder()
    prefix, namespace, _, rest = left.name.rsplit("-", 3)
    left.rename(tmp_path / f"{prefix}-{namespace}-{dead_pid()}-{rest}")
    sweep(tmp_path / "no-such-program")
    assert list(tmp_path.iterdir()) == []


async def test_the_next_start_removes_the_sandboxes_of_a_killed_service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    try:
        sandbox = RunscSandbox(SandboxSection(backend="runsc", slots=1))
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    service = subprocess.Popen([sys.executable, "-c", RUN_FOR_EVER], stdout=subprocess.PIPE, env=environment)
    try:
        assert service.stdout is not None
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(service.stdout.readline) == b"up\n"
    finally:
        service.send_signal(signal.SIGKILL)
        service.wait()
        service.stdout.close() if service.stdout else None
    (left,) = tmp_path.iterdir()
    await sandbox.start()
    try:
        assert left not in tmp_path.iterdir()
    finally:
        await sandbox.close()
    assert list(tmp_path.iterdir()) == []
    assert not running_with(str(left))


def running_with(text: str) -> list[str]:
    """The command lines of processes that contain this text."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(entry.read_bytes().replace(b"\0", b" ").decode("utf8", "replace"))
        except OSError:
            continue
    return [line for line in lines if text in line]
