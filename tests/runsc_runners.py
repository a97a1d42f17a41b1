"""Runners for backend `gvisor` without a cluster: the real agent as process 1 of gVisor sandboxes on this host."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.host_runners import KEY_TEXT, HostRunners, Running, agent_environment, agent_folders, started

from nouscoder.config import SandboxSection
from nouscoder.verifier.runner import handshake
from nouscoder.verifier.sandbox import SandboxUnavailable
from nouscoder.verifier.sandbox.runners.launch import RunnerAccess
from nouscoder.verifier.sandbox.runners.link import PoolKeys
from nouscoder.verifier.sandbox.runners.pods import GvisorSandbox
from nouscoder.verifier.sandbox.runsc import RunscLaunch, find_runsc

_HOME = "/opt/nouscoder"
_FLAGS = ("--platform=systrap", "--network=host", "--ignore-cgroups", "--overlay2=none", "--host-uds=none")


class RunscRunners(HostRunners):
    """`capabilities` are those of the agent, as in the runner pods of the chart."""

    def __init__(self, config: SandboxSection, capabilities: tuple[str, ...]) -> None:
        super().__init__()
        runsc = find_runsc(config.runsc)
        if runsc is None:
            raise SandboxUnavailable("runsc is not installed")
        self._runsc = runsc
        self._launch = RunscLaunch(runsc, config)
        self._capabilities = [f"CAP_{name}" for name in capabilities]

    def command(self, folder: Path, port: int) -> tuple[Sequence[str], Mapping[str, str] | None]:
        """As HostRunners.command."""
        (folder / "config.json").write_text(json.dumps(self._bundle(folder / "root", port)))
        return self._command(folder, "run", "--bundle", str(folder), "runner"), None

    async def end(self, one: Running) -> None:
        """As HostRunners.end."""
        null = asyncio.subprocess.DEVNULL
        command = self._command(one.folder, "delete", "--force", "runner")
        deleting = await asyncio.create_subprocess_exec(*command, stdin=null, stdout=null, stderr=null)
        await deleting.wait()

    def _command(self, folder: Path, *arguments: str) -> Sequence[str]:
        return [str(self._runsc), f"--root={folder}/state", *_FLAGS, *arguments]

    def _bundle(self, root: Path, port: int) -> dict[str, object]:
        mounts = self._launch._fill(root)
        for name, source in agent_folders().items():
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
        process["env"] = [f"{name}={value}" for name, value in agent_environment(_HOME, port).items()]
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
    access = RunnerAccess(PoolKeys(handshake.read_key(KEY_TEXT)))
    async with started(GvisorSandbox(config, source, access)) as sandbox:
        yield sandbox
