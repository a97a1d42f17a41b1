"""Makes OpenMP threads wait without spinning, because processes that share cores would waste CPU time."""

from __future__ import annotations

import os

SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE"}


def wait_passively() -> None:
    """Set this for the process, unless its environment sets another value. Call it before torch is imported."""
    for name, value in SHARED_CORES.items():
        os.environ.setdefault(name, value)
