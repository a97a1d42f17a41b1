"""The temporary folders of gVisor sandboxes: the bundle and the state of `runsc`, with the owner in the name.

INVARIANT: the folder of a killed service, with the sandbox in it, is removed when the next service of the same pid
namespace starts. The folder of a living service is never touched.

The name holds the pid of the service and its pid namespace, because containers that share /tmp have separate pids.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_PREFIX = "nouscoder-runsc-"
_DELETE_LIMIT_S = 10.0
SANDBOX_NAME = "slot"


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
