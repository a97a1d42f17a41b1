"""A runner in gVisor with the chart's three capabilities, which Pod Security's standard `baseline` admits."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from tests.runsc_runners import CHART_CAPABILITIES, WITH_SYS_ADMIN, runsc_pool

from nouscoder.domain.submission import Limits
from nouscoder.verifier.sandbox import Program, SandboxError, SandboxUnavailable
from nouscoder.verifier.sandbox.runners.pods import GvisorSandbox
from nouscoder.verifier.sandbox.session import SlotSession
from nouscoder.verifier.toolchains.languages import registry

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
LIMITS = Limits(wall_time_s=60.0, cpu_time_s=30.0, processes=16)
LOOK = """
import ctypes, os
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
libc = ctypes.CDLL(None, use_errno=True)
print(os.getuid(), os.getgid(), os.getpid() > 1, os.listdir("/proc/1"))
print([status[name].strip().strip("0") for name in ("CapEff", "CapPrm")])
print([libc.unshare(flag) for flag in (0x10000000, 0x20000, 0x20000000)])
print(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), libc.umount2(b"/proc", 2))
print(libc.setuid(0), libc.setgroups(0, None))
def refused(path):
    try: open(path, "w").write("x")
    except OSError: return True
print([refused(path) for path in ("/etc/passwd", "/x", "/proc/sys/kernel/hostname", "/dev/x")])
"""
SEEN = """\
1000 1000 True []
['', '']
[-1, -1, -1]
-1 -1
-1 -1
[True, True, True, True]
"""


@pytest.mark.parametrize("capabilities", [CHART_CAPABILITIES, WITH_SYS_ADMIN], ids=["chart", "SYS_ADMIN"])
async def test_a_candidate_has_no_rights(capabilities: tuple[str, ...]) -> None:
    try:
        async with runsc_pool(capabilities) as sandbox:
            for _ in range(2):
                async with sandbox.session(Program(registry()["python"], LOOK, LIMITS)) as session:
                    for _ in range(2):
                        result = await session.run(b"")
                        assert (result.stdout.decode(), result.stderr) == (SEEN, b"")
    except SandboxUnavailable as error:
        pytest.skip(str(error))


async def cut(sandbox: GvisorSandbox) -> None:
    """End the connection of a slot while a program of many process groups runs. Raises SandboxError."""
    spinning = (
        "import os\nfor _ in range(5):\n    if os.fork() == 0:\n        os.setsid()\n        break\nwhile True: pass\n"
    )
    async with sandbox.session(Program(registry()["python"], spinning, LIMITS)) as session:
        running = asyncio.create_task(session.run(b""))
        done, _ = await asyncio.wait({running}, timeout=2)
        assert not done
        await cast(SlotSession, session).slot.stop()
        await running


async def test_the_agent_kills_every_process_of_a_slot_that_ends_in_a_run() -> None:
    """Without CAP_KILL: they are in a user namespace that the agent's user owns. Else the agent ends the container."""
    try:
        async with runsc_pool() as sandbox:
            (runner,) = sandbox.pool.names
            with pytest.raises(SandboxError):
                await cut(sandbox)
            async with sandbox.session(Program(registry()["python"], LOOK, LIMITS)) as session:
                assert (await session.run(b"")).stdout.decode() == SEEN
            assert list(sandbox.pool.names) == [runner]
            assert not sandbox.pool.replaced
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("missing", CHART_CAPABILITIES)
async def test_without_a_right_of_the_chart_it_says_what_is_missing(missing: str) -> None:
    capabilities = tuple(name for name in CHART_CAPABILITIES if name != missing)
    with pytest.raises(SandboxUnavailable, match="SETFCAP"):
        async with runsc_pool(capabilities, start_s=40):
            pytest.fail("the pool must not start")
