"""A program under which two runners die for lack of memory is judged; without that reason the failure is ours.

The runners are real agents on this machine, and SIGKILL stands for the kernel's at a pod's memory limit.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from tests.modal_server import make_home
from tests.services.test_pool_key_rotation import Agents

from nouscoder.config import SandboxSection
from nouscoder.domain.submission import Limits, StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import SandboxUnavailable
from nouscoder.verifier.sandbox.runners import pods as pods_module
from nouscoder.verifier.sandbox.runners import pool as pool_module
from nouscoder.verifier.sandbox.runners.launch import runner_of
from nouscoder.verifier.sandbox.runners.pods import GvisorSandbox
from nouscoder.verifier.sandbox.runners.pool import FoundRunner
from nouscoder.verifier.sandbox.slot import SlotState

KEY = "0123456789abcdef-a key of a pool"
BOMB = Submission(
    StdinTests((StdinCase("", ""), StdinCase("", ""))), "import time; time.sleep(600)", limits=Limits(300.0, 300.0)
)


class MortalAgents(Agents):
    """Agents of which some have been killed. `tells`: the source knows that they lacked memory."""

    def __init__(self, folder: Path, *, tells: bool) -> None:
        super().__init__(folder)
        self.killed: list[str] = []
        self._tells = tells

    async def kill(self, name: str) -> None:
        self.killed.append(name)
        await self.remove(FoundRunner(name, None))

    async def lacked_memory(self, runner: FoundRunner) -> bool:
        return self._tells and runner.name in self.killed


@pytest.mark.parametrize(
    ("tells", "kind"), [(True, VerdictKind.MEMORY_LIMIT_EXCEEDED), (False, VerdictKind.INTERNAL_ERROR)]
)
async def test_the_program_is_blamed_if_the_source_knows_the_reason(
    tells: bool, kind: VerdictKind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_home(tmp_path)
    monkeypatch.setattr(pool_module, "_CHECK_INTERVAL_S", 0.05)
    for file in ("secret", "key"):
        (tmp_path / file).write_text(KEY)
    agents = MortalAgents(tmp_path, tells=tells)
    monkeypatch.setattr(pods_module, "open_source", lambda config, keys: agents)
    config = SandboxSection(
        backend="gvisor",
        slots=1,
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
    try:
        grading = asyncio.create_task(Grader(sandbox, VerifierMetrics(CollectorRegistry())).grade(BOMB))
        async with asyncio.timeout(200):
            while not grading.done():
                (slot,) = sandbox._slots
                name = runner_of(slot)
                if slot.state is SlotState.IN_USE and name is not None and name not in agents.killed:
                    await agents.kill(name)
                await asyncio.wait([grading], timeout=0.01)
        assert (await grading).kind is kind
        assert len(agents.killed) >= 2
    finally:
        await sandbox.close()
    assert not agents.processes
