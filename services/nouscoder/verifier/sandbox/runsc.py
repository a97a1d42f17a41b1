"""The `runsc` backend: each slot is one long-lived gVisor sandbox on this host with the same harness inside.

INVARIANT: no gVisor sandbox serves more than `max_sessions` submissions. After an unexpected, late or missing answer a
sandbox serves no other submission: it is killed with all its processes and replaced by a fresh one. The folder of a
killed service, with the sandbox in it, is removed when the next service of the same pid namespace starts. The folder of
a living service is never touched.

Candidates run on gVisor's sentry instead of the host's kernel. The sentry is a kernel written in Go that runs as a
confined process of the host. Inside it, candidates get the isolation of the `local` backend: fresh namespaces and a
separate user per submission, a fresh process and /tmp per test, no capabilities, the same allow-list of system calls.
There is no network device but loopback, and no file of the host except the read-only folders of the interpreter.
A test takes longer than with `local` (docs/grading.md, "What gVisor costs").

A sandbox has a temporary folder with its bundle and the state of `runsc`. The name holds the pid of the service and its
pid namespace, because containers that share /tmp have separate pids.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nouscoder.config import SandboxSection
from nouscoder.private_folder import is_trusted, user_cache
from nouscoder.verifier.harness.frames import SlotSettings
from nouscoder.verifier.harness.isolation import (
    COPIED,
    SYSTEM_PATHS,
    WRITTEN,
    outside_system,
    settings_of_runtimes,
)
from nouscoder.verifier.sandbox.base import SandboxUnavailable
from nouscoder.verifier.sandbox.init_build import HARNESS, init_library_path
from nouscoder.verifier.sandbox.local import ENTRY_NAME, LocalSandbox, interpreter, python_command
from nouscoder.verifier.sandbox.slot import ENVIRONMENT, Launch, Link, ProcessLink, Slot, kill
from nouscoder.verifier.toolchains.languages import cache_folders

_PREFIX = "nouscoder-runsc-"
SANDBOX_NAME = "slot"
log = logging.getLogger(__name__)
HOW_TO_GET = "build it once with deploy/build-runsc, or name it in verifier.sandbox.runsc"
_INSIDE, _INIT_INSIDE = Path("/harness"), Path("/init")
_DELETE_LIMIT_S = 10.0
_END_LIMIT_S = 2.0
# The capabilities that the harness's init needs in its own namespaces. Candidates have none.
_CAPABILITIES = [
    f"CAP_{name}" for name in ("SYS_ADMIN", "SETUID", "SETGID", "SETPCAP", "KILL", "CHOWN", "DAC_OVERRIDE", "FOWNER")
]


def new_folder() -> Path:
    """A new folder of this process. Raises OSError."""
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{_pid_namespace()}-{os.getpid()}-"))


def runsc_command(runsc: Path, folder: Path, *arguments: str) -> list[str]:
    """The command line of `runsc` with its state in `folder`."""
    flags = ["--platform=systrap", "--network=none", "--ignore-cgroups", "--overlay2=none", "--host-uds=none"]
    rootless = [] if os.geteuid() == 0 else ["--rootless"]
    return [str(runsc), f"--root={folder}/state", *flags, *rootless, *arguments]


def sweep(runsc: Path) -> Sequence[Path]:
    """Kill the sandboxes of ended services and remove their folders. Returns the folders. Bounded in time."""
    found = [folder for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*") if _is_orphan(folder)]
    for folder in found:
        command = runsc_command(runsc, folder, "delete", "--force", SANDBOX_NAME)
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, capture_output=True, timeout=_DELETE_LIMIT_S, check=False)
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _is_orphan(folder: Path) -> bool:
    namespace, _, rest = folder.name.removeprefix(_PREFIX).partition("-")
    pid = rest.partition("-")[0]
    ours = namespace == str(_pid_namespace()) and folder.is_dir() and not folder.is_symlink()
    with contextlib.suppress(OSError):
        return ours and folder.stat().st_uid == os.geteuid() and pid.isdigit() and not Path(f"/proc/{pid}").exists()
    return False


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def find_runsc(configured: str = "") -> Path | None:
    """The configured program, else the one on PATH, else the one that deploy/build-runsc made; None without any."""
    if configured:
        return Path(configured) if os.access(configured, os.X_OK) else None
    found = shutil.which("runsc")
    if found:
        return Path(found)
    built = user_cache("bin") / "runsc"
    return built if is_trusted(built.parent) and is_trusted(built) and os.access(built, os.X_OK) else None


class RunscSandbox(LocalSandbox):
    """The local backend's pool of slots, with gVisor sandboxes as slots. Raises SandboxUnavailable."""

    name = "runsc"
    _keeps_compiled = False

    def __init__(self, config: SandboxSection, *, tool_slots: int = 0) -> None:
        runsc = find_runsc(config.runsc)
        if runsc is None:
            raise SandboxUnavailable(f"the runsc sandbox cannot start: runsc is not installed; {HOW_TO_GET}")
        self._runsc = runsc
        super().__init__(config, tool_slots=tool_slots)

    async def start(self) -> None:
        """See `Sandbox`. First removes the sandboxes that a killed service has left."""
        removed = await asyncio.to_thread(sweep, self._runsc)
        if removed:
            log.warning("sandboxes of a killed service were removed", extra={"num_sandboxes": len(removed)})
        await super().start()

    @property
    def isolation(self) -> tuple[str, ...]:
        """See `Sandbox`."""
        omitted = ("namespace:user", "separate-users", "cgroup:")
        inner = (layer for layer in super().isolation if not layer.startswith(omitted))
        return ("gvisor:systrap", *inner, "separate-users")

    def _make_slot(self, index: int) -> Slot:
        return Slot(index, self._config, RunscLaunch(self._runsc, self._config), self._config.max_sessions)


class RunscLaunch(Launch):
    """Starts a gVisor sandbox: an OCI bundle in a temporary folder, and `runsc run` on it."""

    def __init__(self, runsc: Path, config: SandboxSection) -> None:
        self._runsc = runsc
        self._python = interpreter(config)
        site_packages = tuple(str(folder.resolve()) for folder in config.site_packages)
        self._visible = (str(Path(self._python).resolve().parent.parent), *site_packages, *cache_folders())
        self._settings = SlotSettings(
            site_packages=site_packages,
            read_only=cache_folders(),
            tmp_bytes=config.tmp_bytes,
            init_library=str(_INIT_INSIDE / init_library_path().name),
            kernel="gvisor",
        )
        self._folder: Path | None = None

    async def open(self) -> Link:
        """Make a fresh bundle and run it in the foreground."""
        self._remove_folder()
        self._folder = new_folder()
        root = self._folder / "root"
        mounts = self._fill(root)
        (self._folder / "config.json").write_text(json.dumps(self._bundle(root, mounts)))
        command = runsc_command(self._runsc, self._folder, "run", "--bundle", str(self._folder), SANDBOX_NAME)
        return await ProcessLink.start(command, self._end)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Kill the sandbox and its gofer with `runsc delete --force`, then the waiting parent; remove the folder."""
        try:
            await self._delete()
            # The parent now exits by itself. A signal at that time could make asyncio lose its exit status.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_LIMIT_S):
                    await process.wait()
            await kill(process)
        finally:
            self._remove_folder()

    def explain(self, reason: str) -> str:
        """See `Launch.explain`."""
        return f"the runsc sandbox cannot start: {reason} (program: {self._runsc}; `nouscoder doctor` shows details)"

    async def _delete(self) -> None:
        if self._folder is None:
            return
        null = asyncio.subprocess.DEVNULL
        command = runsc_command(self._runsc, self._folder, "delete", "--force", SANDBOX_NAME)
        deleting = await asyncio.create_subprocess_exec(*command, stdin=null, stdout=null, stderr=null)
        try:
            async with asyncio.timeout(_DELETE_LIMIT_S):
                await deleting.wait()
        except TimeoutError:
            await kill(deleting)

    def _remove_folder(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _fill(self, root: Path) -> list[dict[str, object]]:
        """Make the folders and files of the root. Returns the mounts on it."""
        mounts: list[dict[str, object]] = [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev"]},
        ]
        wanted = (*SYSTEM_PATHS, *settings_of_runtimes(), *outside_system(self._visible))
        binds = {path: path for path in wanted if os.path.isdir(path)}
        binds[str(_INSIDE)] = str(HARNESS)
        binds[str(_INIT_INSIDE)] = str(init_library_path().parent)
        for target, source in binds.items():
            place = root / target.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            if os.path.islink(source) and source in SYSTEM_PATHS:
                place.symlink_to(os.readlink(source))
                continue
            place.mkdir(exist_ok=True)
            options = ["rbind", "ro", "nosuid", "nodev"]
            mounts.append({"destination": target, "type": "bind", "source": source, "options": options})
        for name, text in WRITTEN.items():
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text(text)
        for name in COPIED:
            with contextlib.suppress(OSError):
                (root / name.lstrip("/")).write_bytes(Path(name).read_bytes())
        for folder in ("proc", "tmp", "dev", "program"):
            (root / folder).mkdir(exist_ok=True)
        return mounts

    def _bundle(self, root: Path, mounts: list[dict[str, object]]) -> dict[str, object]:
        """The OCI runtime configuration."""
        sets = ("bounding", "effective", "permitted")
        return {
            "ociVersion": "1.0.2",
            "hostname": "sandbox",
            "root": {"path": str(root), "readonly": True},
            "mounts": mounts,
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": [*python_command(self._python, _INSIDE / ENTRY_NAME), self._settings.to_json()],
                "env": [f"{key}={value}" for key, value in ENVIRONMENT.items()],
                "cwd": "/",
                "capabilities": dict.fromkeys(sets, _CAPABILITIES),
                "noNewPrivileges": True,
            },
            "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
        }
