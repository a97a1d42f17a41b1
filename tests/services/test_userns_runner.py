"""A runner in a user namespace of its own, as backend `userns` has it on pods with hostUsers: false."""

from __future__ import annotations

import pytest
from tests import userns_runners
from tests.services.test_runner_capabilities import LIMITS, cut
from tests.userns_runners import CHART_CAPABILITIES, userns_pool

from nouscoder.verifier.sandbox import Program, SandboxError, SandboxUnavailable
from nouscoder.verifier.toolchains.languages import registry

LOOK = """
import os
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(os.getuid(), os.getgid(), sorted(pid for pid in os.listdir("/proc") if pid.isdigit()) == [str(os.getpid())])
print([status[name].strip().strip("0") for name in ("CapEff", "CapPrm")], open("/proc/self/uid_map").read().split())
def refused(path):
    try: open(path, "w").write("x")
    except OSError: return True
print([refused(path) for path in ("/etc/passwd", "/x", "/proc/sys/kernel/hostname", "/dev/x")])
"""
SEEN = """\
1000 1000 True
['', ''] ['0', '65530', '1', '1000', '65531', '1']
[True, True, True, True]
"""
LOOPBACK = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    with socket.create_connection(server.getsockname(), timeout=5): print("connected")
"""


async def test_a_candidate_has_no_rights_and_reaches_its_own_loopback() -> None:
    try:
        async with userns_pool() as sandbox:
            assert {"userns:pod", "namespace:user", "separate-users", "seccomp"} <= {*sandbox.isolation}
            for code, printed in ((LOOK, SEEN), (LOOPBACK, "connected\n")):
                async with sandbox.session(Program(registry()["python"], code, LIMITS)) as session:
                    for _ in range(2):
                        result = await session.run(b"")
                        assert (result.stdout.decode(), result.stderr) == (printed, b"")
    except SandboxUnavailable as error:
        pytest.skip(str(error))


async def test_the_agent_kills_every_process_of_a_slot_that_ends_in_a_run() -> None:
    """Without CAP_KILL: they are in a user namespace that the agent's user owns. Else the agent ends the container."""
    try:
        async with userns_pool() as sandbox:
            (runner,) = sandbox.pool.names
            with pytest.raises(SandboxError):
                await cut(sandbox)
            async with sandbox.session(Program(registry()["python"], LOOK, LIMITS)) as session:
                assert (await session.run(b"")).stdout.decode() == SEEN
            assert list(sandbox.pool.names) == [runner]
            assert not sandbox.pool.replaced
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.heavy
@pytest.mark.parametrize("missing", CHART_CAPABILITIES)
async def test_no_right_of_the_chart_is_spare(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NET_ADMIN candidates have no loopback; without another one no runner starts."""
    kept = tuple(name for name in CHART_CAPABILITIES if name != missing)
    monkeypatch.setattr(userns_runners, "CHART_CAPABILITIES", kept)
    if missing != "NET_ADMIN":
        with pytest.raises(SandboxUnavailable):
            async with userns_pool(start_s=8):
                pytest.fail("the pool must not start")
        return
    async with (
        userns_pool() as sandbox,
        sandbox.session(Program(registry()["python"], LOOPBACK, LIMITS)) as session,
    ):
        assert b"connected" not in (await session.run(b"")).stdout
