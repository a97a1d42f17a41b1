"""What counts as left behind by a sandbox: only what is new, because other tests of this process give things back."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

from tests.host_state import HostState


def test_a_descriptor_that_another_test_has_closed_is_no_difference() -> None:
    with socket.socket():
        before = HostState.now()
    assert HostState.now().left_since(before) == []


def test_an_open_descriptor_is_named() -> None:
    before = HostState.now()
    number = os.open("/dev/zero", os.O_RDONLY)
    try:
        (left,) = HostState.now().left_since(before)
    finally:
        os.close(number)
    assert left == "1 more open descriptors; new: ['/dev/zero']"


def test_each_kind_of_leftover_is_named() -> None:
    before = HostState.now()
    after = replace(
        before,
        mounts=before.mounts + type(before.mounts)(["tmpfs /left tmpfs"]),
        cgroups=before.cgroups | {"/sys/fs/cgroup/left"},
        objects=before.objects + type(before.objects)(["shm"]),
        strange_files=before.strange_files | {"/tmp/left"},
    )
    wanted = ["mount tmpfs /left tmpfs", "cgroup /sys/fs/cgroup/left", "System V object: shm", "file /tmp/left"]
    assert after.left_since(before) == wanted
