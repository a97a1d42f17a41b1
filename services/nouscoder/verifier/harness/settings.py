"""The settings of a slot: one JSON object on its command line, the same for all its candidates.

The harness uses NamedTuple because importing dataclasses would make every later fork slower by 0.1 ms.
"""

from __future__ import annotations

import json
from typing import NamedTuple


class SlotSettings(NamedTuple):
    """`uid_init` and `uid_candidate` are host user ids, or None to map a single user (the service is not root)."""

    site_packages: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    read_only: tuple[str, ...] = ()  # further folders of the host that candidates see at the same paths
    tmp_bytes: int = 256 * 1024**2
    tmp_inodes: int = 65536
    stack_bytes: int = 256 * 1024**2
    uid_init: int | None = None
    uid_candidate: int | None = None
    init_library: str = ""  # path of the compiled init (init/)
    peer: int = -1  # a descriptor: the socket to the slot of the partner
    groups: tuple[str, ...] = ()  # the files cgroup.procs of the control groups that the harness joins
    kernel: str = "linux"  # the kernel below the slot: "linux" or "gvisor"

    def to_json(self) -> str:
        """The settings as JSON for the command line."""
        return json.dumps(self._asdict())

    @staticmethod
    def from_json(text: str) -> SlotSettings:
        """Inverse of `to_json`. Raises TypeError for unknown keys."""
        values = json.loads(text)
        values["site_packages"] = tuple(values["site_packages"])
        values["preload"] = tuple(values["preload"])
        values["read_only"] = tuple(values["read_only"])
        values["groups"] = tuple(values.get("groups", ()))  # a gateway sends none to a runner
        return SlotSettings(**values)
