"""Runners for backend `gvisor` without a cluster: the real agent as process 1 of gVisor sandboxes on this host.

The agents listen on the host's loopback (`--network=host`). In a pod a NetworkPolicy takes that place.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from nouscoder.bench.measuring import free_addresses
from nouscoder.config import SandboxSection
from nouscoder.verifier.runner import __file__ as runner_init
from nouscoder.verifier.runner import handshake
from nouscoder.verifier.sandbox import SandboxUnavailable
from nouscoder.verifier.sandbox.init_build import HARNESS, init_library_path
from nouscoder.verifier.sandbox.runners.gvisor import GvisorSandbox
from nouscoder.verifier.sandbox.runners.launch import RunnerAccess
from nouscoder.verifier.sandbox.runners.link import PoolKeys
from nouscoder.verifier.sandbox.runners.pool import FoundRunner
from nouscoder.verifier.sandbox.runsc import RunscLaunch, find_runsc

log = logging.getLogger(__name__)

KEY_TEXT = "the key of a pool of tests, which is no secret"
_HOME = "/opt/nouscoder"
_FLAGS = ("--platform=systrap", "--network=host", "--ignore-cgroups", "--overlay2=none", "--host-uds=none")


@dataclass(frozen=True, slots=True)
class _Running:
    process: asyncio.subprocess.Process
    folder: Path
    port: int

    @property
    def address(self) -> tuple[str, int] | None:
        """None until it listens."""
        return ("127.0.0.1", self.port) if "listening" in (self.folder / "log").read_text() else None


class RunscRunners:
    """See `Source`. `capabilities` are those of the agent, as in the runner pods of the chart."""

    def __init__(self, config: SandboxSection, capabilities: tuple[str, ...]) -> None:
        runsc = find_runsc(config.runsc)
        if runsc is None:
            raise SandboxUnavailable("runsc is not installed")
        self._runsc = runsc
        self._launch = RunscLaunch(runsc, config)
        self._capabilities = [f"CAP_{name}" for name in capabilities]
        self._running: dict[str, _Running] = {}

    async def start(self, on_change: Callable[[], None]) -> None:
        """See `Source`."""

    async def list(self) -> Sequence[FoundRunner]:
        """See `Source`."""
        return [FoundRunner(name, one.address) for name, one in self._running.items()]

    async def create(self) -> str | None:
        """See `Source`."""
        folder = Path(tempfile.mkdtemp(prefix="runsc-runner-"))
        port = int(free_addresses(1)[0].rpartition(":")[2])
        (folder / "config.json").write_text(json.dumps(self._bundle(folder / "root", port)))
        command = self._command(folder, "run", "--bundle", str(folder), "runner")
        null = asyncio.subprocess.DEVNULL
        with (folder / "log").open("wb") as output:
            process = await asyncio.create_subprocess_exec(*command, stdin=null, stdout=output, stderr=output)
        self._running[folder.name] = _Running(process, folder, port)
        return folder.name

    async def remove(self, runner: FoundRunner) -> None:
        """See `Source`."""
        one = self._running.pop(runner.name, None)
        if one is None:
            return
        log.info("the log of runner %s: %s", runner.name, (one.folder / "log").read_text())
        null = asyncio.subprocess.DEVNULL
        command = self._command(one.folder, "delete", "--force", "runner")
        deleting = await asyncio.create_subprocess_exec(*command, stdin=null, stdout=null, stderr=null)
        await deleting.wait()
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

    def _command(self, folder: Path, *arguments: str) -> Sequence[str]:
        return [str(self._runsc), f"--root={folder}/state", *_FLAGS, *arguments]

    def _bundle(self, root: Path, port: int) -> dict[str, object]:
        mounts = self._launch._fill(root)
        for name, source in (
            ("harness", HARNESS),
            ("runner", Path(runner_init).parent),
            ("init", init_library_path().parent),
        ):
            (root / _HOME.lstrip("/") / name).mkdir(parents=True, exist_ok=True)
            options = ["rbind", "ro", "nosuid", "nodev"]
            mounts.append({"destination": f"{_HOME}/{name}", "type": "bind", "source": str(source), "options": options})
        (root / "etc/ssl").mkdir(exist_ok=True)
        shutil.copy("/etc/ssl/openssl.cnf", root / "etc/ssl/openssl.cnf")  # the agent makes a certificate
        mounts += _mounts_of_the_kubelet(root)
        bundle = self._launch._bundle(root, mounts)
        process = bundle["process"]
        assert isinstance(process, dict)
        process["args"] = [process["args"][0], "-I", "-S", f"{_HOME}/runner/__main__.py"]
        process["env"] = [
            f"NOUSCODER_RUNNER_KEY={KEY_TEXT}",
            f"NOUSCODER_RUNNER_PORT={port}",
            f"NOUSCODER_RUNNER_HOME={_HOME}",
        ]
        process["capabilities"] = dict.fromkeys(("bounding", "effective", "permitted"), self._capabilities)
        bundle["linux"] = {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]}
        return bundle


def _mounts_of_the_kubelet(root: Path) -> list[dict[str, object]]:
    """What containerd and the kubelet mount in every container of a pod."""
    own = ["nosuid", "noexec", "nodev"]
    mounts: list[dict[str, object]] = [
        {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": own[:2]},
        {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": own},
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": own},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": [*own, "ro"]},
    ]
    (root.parent / "kubelet").mkdir()
    for name in ("etc/hosts", "etc/hostname", "etc/resolv.conf", "dev/termination-log"):
        source = root.parent / "kubelet" / name.replace("/", "-")
        source.write_text("10.244.0.99 a-name-of-the-pod\n")
        (root / name).touch()
        mounts.append({"destination": f"/{name}", "type": "bind", "source": str(source), "options": ["rbind", "rw"]})
    return mounts


CHART_CAPABILITIES = ("SETUID", "SETGID", "SETFCAP")
# Those of hosts that give a container more, as `runsc` on this host does.
WITH_SYS_ADMIN = ("SYS_ADMIN", "SETUID", "SETGID", "SETPCAP", "KILL", "CHOWN", "DAC_OVERRIDE", "FOWNER")


@asynccontextmanager
async def runsc_pool(
    capabilities: tuple[str, ...] = CHART_CAPABILITIES, slots: int = 1, start_s: float = 120
) -> AsyncIterator[GvisorSandbox]:
    """A started backend `gvisor` with such runners. Raises SandboxUnavailable."""
    if os.geteuid() != 0:
        raise SandboxUnavailable("runsc needs root to use the host's network")
    config = SandboxSection(backend="gvisor", slots=slots, pool_spares=0, pool_start_s=start_s)
    source = RunscRunners(config, capabilities)
    sandbox = GvisorSandbox(config, source, RunnerAccess(PoolKeys(handshake.read_key(KEY_TEXT))))
    try:
        await sandbox.start()
        yield sandbox
    finally:
        await sandbox.close()
