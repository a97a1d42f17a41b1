"""The root of a slot's candidates in gVisor: the same as in `root.py`, made with the calls that the sentry has.

INVARIANT: after `enter_root` nothing else of the container can be reached: no file of the harness or of the kubelet.

The sentry has no mount_setattr. In a user namespace it lets nobody unmount what the container had mounted before, such
as /sys and /etc/resolv.conf; they go with the whole old root.
"""

from __future__ import annotations

import os

from . import kernel, root

_OLD = "/old"
_SEALED = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID


def enter_root(read_only: tuple[str, ...]) -> None:
    """See `root.enter_root`. Raises OSError naming the failed step."""
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    parts = root.Parts.open(read_only)
    root.mount_staging()
    for path, fd in parts.folders.items():
        target = root.STAGING + path
        os.makedirs(target, mode=0o755, exist_ok=True)
        kernel.mount(f"/proc/self/fd/{fd}", target, "", kernel.MS_BIND | kernel.MS_REC)
        kernel.mount("none", target, "", _SEALED | kernel.MS_NODEV)
        os.close(fd)
    root.fill(parts)
    os.mkdir(root.STAGING + _OLD)
    kernel.pivot_root(root.STAGING, root.STAGING + _OLD)
    os.chdir("/")
    kernel.unmount(_OLD)
    os.rmdir(_OLD)
    for place in ("/dev", "/"):
        kernel.mount("none", place, "", _SEALED)
