"""The pool's key changes while submissions run: every verdict is right, and all runners end up with the new key.

The runners are real agents with real harnesses, as processes here. The file `secret` stands for the Secret in
the runners' namespace, from which a new runner gets its key; `key` is the file of the gateway.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from tests.modal_server import make_home

from nouscoder.config import SandboxSection
from nouscoder.domain.submission import Limits
from nouscoder.verifier.runner import __file__ as runner_init
from nouscoder.verifier.sandbox import Program, SandboxUnavailable
from nouscoder.verifier.sandbox.runners import link as runner_link
from nouscoder.verifier.sandbox.runners import pods as pods_module
from nouscoder.verifier.sandbox.runners import pool as pool_module
from nouscoder.verifier.sandbox.runners.link import PoolKeys
from nouscoder.verifier.sandbox.runners.pods import GvisorSandbox
from nouscoder.verifier.sandbox.runners.pool import FoundRunner, Replaced, RunnerState
from nouscoder.verifier.toolchains import languages

OLD, NEW = "an old key of the pool, long", "a new key of the pool, longer"
LIMITS = Limits(wall_time_s=60, cpu_time_s=60)
DOUBLE = Program(languages.registry()["python"], "print(2 * int(input()))", LIMITS)


class Agents:
    """A source whose runners are agents on this machine, with the key that `secret` holds at their start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, tuple[subprocess.Popen[bytes], int, str]] = {}
        self.num_made = 0

    async def start(self, on_change: Callable[[], None]) -> None:
        """Report no changes, because the pool checks often enough."""

    async def list(self) -> Sequence[FoundRunner]:
        ports = {name: port for name, (_, port, _) in self.processes.items()}
        return [FoundRunner(name, ("127.0.0.1", port) if port else None) for name, port in ports.items()]

    async def create(self) -> str | None:
        key = (self.folder / "secret").read_text()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {
            "NOUSCODER_RUNNER_KEY": key,
            "NOUSCODER_RUNNER_PORT": str(port),
            "NOUSCODER_RUNNER_HOME": str(self.folder / "home"),
            "NOUSCODER_RUNNER_KERNEL": "linux",
        }
        entry = str(Path(runner_init).with_name("__main__.py"))
        self.num_made += 1
        name = f"agent-{self.num_made}"
        process = subprocess.Popen([sys.executable, "-I", "-S", entry], env=environment, stderr=subprocess.PIPE)
        self.processes[name] = (process, 0, key)  # first, because a cancellation here must not leave it running
        assert process.stderr is not None
        line = await asyncio.to_thread(process.stderr.readline)
        assert b"listening" in line, line
        self.processes[name] = (process, port, key)
        return name

    async def remove(self, runner: FoundRunner) -> None:
        process, _, _ = self.processes.pop(runner.name)
        process.kill()
        await asyncio.to_thread(process.wait)
        assert process.stderr is not None
        process.stderr.close()

    async def quarantine(self, runner: FoundRunner) -> None:
        await self.remove(runner)

    async def lacked_memory(self, runner: FoundRunner) -> bool:
        return False

    async def close(self) -> None:
        for name in list(self.processes):
            await self.remove(FoundRunner(name, None))

    def keys(self) -> set[str]:
        return {key for _, _, key in self.processes.values()}


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[GvisorSandbox, Agents]]:
    make_home(tmp_path)
    monkeypatch.setattr(pods_module, "_KEY_CHECK_S", 0.1)
    monkeypatch.setattr(runner_link, "_SETTLE_S", 0.5)
    monkeypatch.setattr(pool_module, "_CHECK_INTERVAL_S", 0.05)
    agents = Agents(tmp_path)
    monkeypatch.setattr(pods_module, "open_source", lambda config, keys: agents)
    for name in ("secret", "key"):
        (tmp_path / name).write_text(OLD)
    config = SandboxSection(
        backend="gvisor",
        slots=2,
        pool_key_file=str(tmp_path / "key"),
        pool_spares=1,
        pool_start_s=120,
        pool_accept_unproven_kernel=True,
    )
    sandbox = GvisorSandbox(config)
    try:
        await sandbox.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield sandbox, agents
    await sandbox.close()
    assert not agents.processes


async def grade_until(sandbox: GvisorSandbox, is_over: Callable[[], bool]) -> int:
    """Run submissions on all slots until `is_over`; every one must give the right output. Returns their number."""
    done = 0

    async def client(number: int) -> None:
        nonlocal done
        while not is_over():
            async with sandbox.session(DOUBLE) as session:
                for _ in range(3):
                    assert (await session.run(b"%d\n" % number)).stdout == b"%d\n" % (2 * number)
            done += 1

    async with asyncio.timeout(200), asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(client(number))
    return done


@pytest.mark.parametrize("first", ["secret", "key"])
async def test_a_changed_key_loses_no_submission_whichever_namespace_gets_it_first(
    rig: tuple[GvisorSandbox, Agents], first: str
) -> None:
    sandbox, agents = rig
    before = set(agents.processes)
    (agents.folder / first).write_text(NEW)
    some = await grade_until(sandbox, iter([False] * 30 + [True] * 3).__next__)
    (agents.folder / ("key" if first == "secret" else "secret")).write_text(NEW)

    def all_are_new() -> bool:
        states = sandbox.pool.states
        return agents.keys() == {NEW} and states[RunnerState.READY] + states[RunnerState.LENT] == 3

    done = await grade_until(sandbox, all_are_new)
    assert not before & set(agents.processes)
    assert sandbox.use.replacements[Replaced.KEY] >= 3
    assert sandbox.use.replacements.get(Replaced.CANARY, 0) == 0
    await grade_until(sandbox, iter([False] * 6 + [True] * 3).__next__)
    print(f"{some} + {done} submissions while the key changed, {agents.num_made} runners made")


async def test_an_idle_pool_follows_the_key_too(rig: tuple[GvisorSandbox, Agents]) -> None:
    sandbox, agents = rig
    for name in ("secret", "key"):
        (agents.folder / name).write_text(NEW)
    async with asyncio.timeout(120):
        while agents.keys() != {NEW} or sandbox.pool.states[RunnerState.LENT] != 2:
            await asyncio.sleep(0.05)
    async with sandbox.session(DOUBLE) as session:
        assert (await session.run(b"4\n")).stdout == b"8\n"


def test_an_unreadable_or_short_key_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(OLD)
    keys = PoolKeys.of_file(path)
    before = keys.of("pod-1")
    for text in ("", "short", "\0"):
        path.write_text(text)
        assert not keys.reload()
    path.write_bytes(b"\xff\xfe")
    assert not keys.reload()
    path.unlink()
    assert not keys.reload()
    assert keys.of("pod-1") == before
    path.write_text(NEW)
    assert keys.reload()
    assert not keys.reload()
    assert keys.of("pod-1")[1:] == before
    with pytest.raises(SandboxUnavailable, match="pool_key_file"):
        PoolKeys.of_file(tmp_path / "missing")


def test_only_the_newest_keys_are_kept_and_a_runner_is_first_asked_with_its_own(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"{OLD} 0")
    keys = PoolKeys.of_file(path)
    (own,) = keys.of("pod-1")
    keys.answered("pod-1", own)
    for number in range(1, 6):
        path.write_text(f"{OLD} {number}")
        assert keys.reload()
    assert own not in keys.of("pod-2")
    assert len(keys.of("pod-2")) == 3
    assert keys.of("pod-1")[0] == own
    keys.forget_all_but(frozenset({"pod-2"}))
    assert own not in keys.of("pod-1")
