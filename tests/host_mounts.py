"""The mounts that a sandbox could leave behind in the namespace of the tests."""

from __future__ import annotations

from pathlib import Path

# Parts of the mount points and sources that containers of other programs use, which come and go at any time.
_OF_CONTAINERS = ("k8s", "containerd", "kubelet", "netns", "buildah", "containers/storage", "docker")


def host_mounts() -> list[str]:
    """The lines of /proc/self/mounts without those of other programs' containers."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [line for line in lines if not any(part in line for part in _OF_CONTAINERS)]
