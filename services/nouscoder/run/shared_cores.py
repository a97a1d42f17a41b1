"""Processes that share cores must not burn them waiting for each other: OpenMP spins by default."""

from __future__ import annotations

import os

SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE"}


def wait_passively() -> None:
    """For this process, unless its environment says otherwise. Call it before torch is imported."""
    for name, value in SHARED_CORES.items():
        os.environ.setdefault(name, value)
