"""Runners for backend `userns` without a cluster: the real agent as process 1 of a user namespace on this host.

It has what the chart gives a runner pod: 65536 users that are none of the host's, its own pid, mount, ipc and uts
namespaces, a complete /proc, and the capabilities of the chart. It listens on the host's loopback; in a pod a
NetworkPolicy takes that place.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from nouscoder.bench.measuring import free_addresses
from nouscoder.config import SandboxSection
from nouscoder.verifier.runner import __file__ as runner_init
from nouscoder.verifier.runner import handshake
from nouscoder.verifier.runner.kernel import why_not_userns
from nouscoder.verifier.sandbox import SandboxUnavailable
from nouscoder.verifier.sandbox.init_build import HARNESS, init_library_path
from nouscoder.verifier.sandbox.runners.gvisor import UsernsSandbox
from nouscoder.verifier.sandbox.runners.launch import RunnerAccess
from nouscoder.verifier.sandbox.runners.link import PoolKeys
from nouscoder.verifier.sandbox.runners.pool import FoundRunner

KEY_TEXT = "the key of a pool of tests, which is no secret"
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


@dataclass(frozen=True, slots=True)
class _Running:
    process: asyncio.subprocess.Process
    folder: Path
    port: int

    @property
    def address(self) -> tuple[str, int] | None:
        """None until it listens."""
        return ("127.0.0.1", self.port) if "listening" in (self.folder / "log").read_text() else None


class UsernsRunners:
    """See `Source`."""

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}

    async def start(self, on_change: Callable[[], None]) -> None:
        """See `Source`."""

    async def list(self) -> Sequence[FoundRunner]:
        """See `Source`."""
        return [FoundRunner(name, one.address) for name, one in self._running.items()]

    async def create(self) -> str | None:
        """See `Source`."""
        folder = Path(tempfile.mkdtemp(prefix="userns-runner-"))
        home = folder / "home"
        for name, source in (
            ("harness", HARNESS),
            ("runner", Path(runner_init).parent),
            ("init", init_library_path().parent),
        ):
            shutil.copytree(source, home / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (folder, *home.rglob("*")):
            path.chmod(0o755)
        home.chmod(0o755)
        port = int(free_addresses(1)[0].rpartition(":")[2])
        environment = {
            "NOUSCODER_RUNNER_KEY": KEY_TEXT,
            "NOUSCODER_RUNNER_PORT": str(port),
            "NOUSCODER_RUNNER_HOME": str(home),
            "NOUSCODER_RUNNER_KERNEL": "linux",
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        }
        kept = ",".join(f"+{name.lower()}" for name in CHART_CAPABILITIES)
        limited = ("setpriv", f"--bounding-set=-all,{kept}", f"--inh-caps=-all,{kept}")
        agent = (PYTHON, "-I", "-S", str(home / "runner" / "__main__.py"))
        with (folder / "log").open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(PYTHON, "-I", "-c", _ENTER, *limited, *agent),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd="/",
            )
        self._running[folder.name] = _Running(process, folder, port)
        return folder.name

    async def remove(self, runner: FoundRunner) -> None:
        """See `Source`."""
        one = self._running.pop(runner.name, None)
        if one is None:
            return
        sys.stderr.write((one.folder / "log").read_text())
        with suppress(ProcessLookupError):
            one.process.kill()
        await one.process.wait()
        shutil.rmtree(one.folder, ignore_errors=True)

    async def quarantine(self, runner: FoundRunner) -> None:
        """See `Source`."""
        await self.remove(runner)

    async def lacked_memory(self, runner: FoundRunner) -> bool:
        """See `Source`."""
        return False

    async def close(self) -> None:
        """See `Source`."""
        for name in list(self._running):
            await self.remove(FoundRunner(name, None))


def userns_sandbox(config: SandboxSection) -> UsernsSandbox:
    """The backend `userns` with such runners, not started. Raises SandboxUnavailable."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None or not os.path.exists(PYTHON):
        raise SandboxUnavailable(f"needs root, setpriv and {PYTHON}")
    access = RunnerAccess(PoolKeys(handshake.read_key(KEY_TEXT)), backend="userns", refusal=why_not_userns)
    return UsernsSandbox(config, UsernsRunners(), access)


@asynccontextmanager
async def userns_pool(start_s: float = 60.0) -> AsyncIterator[UsernsSandbox]:
    """The started backend with one slot. Raises SandboxUnavailable."""
    sandbox = userns_sandbox(SandboxSection(backend="userns", slots=1, pool_spares=0, pool_start_s=start_s))
    try:
        await sandbox.start()
        yield sandbox
    finally:
        await sandbox.close()
