"""Runners for backend `userns` without a cluster: the real agent as process 1 of a user namespace on this host.

It has what the chart gives a runner pod: 65536 users that are none of the host's, its own pid, mount, ipc and uts
namespaces, a complete /proc, and the capabilities of the chart.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.host_runners import KEY_TEXT, HostRunners, agent_environment, agent_folders, started

from nouscoder.config import SandboxSection
from nouscoder.verifier.runner import handshake
from nouscoder.verifier.runner.kernel import why_not_userns
from nouscoder.verifier.sandbox import SandboxUnavailable
from nouscoder.verifier.sandbox.runners.launch import RunnerAccess
from nouscoder.verifier.sandbox.runners.link import PoolKeys
from nouscoder.verifier.sandbox.runners.pods import UsernsSandbox

PYTHON = "/usr/bin/python3"  # an interpreter that every user may read
CHART_CAPABILITIES = ("SYS_ADMIN", "NET_ADMIN", "SETUID", "SETGID")
_FIRST_USER = 300_000
# As root: a child enters the user namespace, this process maps the users, and the child becomes the agent.
_ENTER = f"""
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
moved, go = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    os.close(go[1])
    if libc.unshare(0x10000000): sys.exit("no user namespace")
    os.write(moved[1], b"1")
    if not os.read(go[0], 1): sys.exit(1)
    os.setgid(0), os.setuid(0), os.setgroups([])
    libc.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    own = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--ipc", "--uts", "--cgroup", "--mount-proc"]
    os.execvp(own[0], [*own, "--", *sys.argv[1:]])
libc.prctl(1, 9)
os.close(moved[1]), os.close(go[0])
os.read(moved[0], 1)
for name in ("uid_map", "gid_map"):
    with open(f"/proc/{{child}}/{{name}}", "w") as file: file.write("0 {_FIRST_USER} 65536")
os.write(go[1], b"1")
os.waitpid(child, 0)
"""


class UsernsRunners(HostRunners):
    """Each has a copy of the agent's home that its users may read."""

    def command(self, folder: Path, port: int) -> tuple[Sequence[str], Mapping[str, str] | None]:
        """As HostRunners.command."""
        home = folder / "home"
        for name, source in agent_folders().items():
            shutil.copytree(source, home / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (folder, home, *home.rglob("*")):
            path.chmod(0o755)
        environment = agent_environment(str(home), port)
        environment |= {"NOUSCODER_RUNNER_KERNEL": "linux", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        kept = ",".join(f"+{name.lower()}" for name in CHART_CAPABILITIES)
        limited = ("setpriv", f"--bounding-set=-all,{kept}", f"--inh-caps=-all,{kept}")
        agent = (PYTHON, "-I", "-S", str(home / "runner" / "__main__.py"))
        return (PYTHON, "-I", "-c", _ENTER, *limited, *agent), environment


def userns_sandbox(config: SandboxSection) -> UsernsSandbox:
    """The backend `userns` with such runners, not started. Raises SandboxUnavailable."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None or not os.path.exists(PYTHON):
        raise SandboxUnavailable(f"needs root, setpriv and {PYTHON}")
    access = RunnerAccess(PoolKeys(handshake.read_key(KEY_TEXT)), backend="userns", refusal=why_not_userns)
    return UsernsSandbox(config, UsernsRunners(), access)


@asynccontextmanager
async def userns_pool(start_s: float = 60.0) -> AsyncIterator[UsernsSandbox]:
    """The started backend with one slot. Raises SandboxUnavailable."""
    config = SandboxSection(backend="userns", slots=1, pool_spares=0, pool_start_s=start_s)
    async with started(userns_sandbox(config)) as sandbox:
        yield sandbox
