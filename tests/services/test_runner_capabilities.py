"""A runner in gVisor without SYS_ADMIN, which Pod Security's standard `baseline` admits, isolates like one with it."""

from __future__ import annotations

import pytest
from tests.runsc_runners import BASELINE_CAPABILITIES, CHART_CAPABILITIES, runsc_pool

from nouscoder.domain.submission import Limits
from nouscoder.verifier.sandbox import Program, SandboxUnavailable
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


@pytest.mark.parametrize("capabilities", [BASELINE_CAPABILITIES, CHART_CAPABILITIES], ids=["baseline", "SYS_ADMIN"])
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


async def test_without_the_right_to_map_users_it_says_what_is_missing() -> None:
    capabilities = tuple(name for name in BASELINE_CAPABILITIES if name != "SETFCAP")
    with pytest.raises(SandboxUnavailable, match="SETFCAP"):
        async with runsc_pool(capabilities, start_s=40):
            pytest.fail("the pool must not start")
