"""A published policy: which weights are which version."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicyManifest:
    """One published set of weights, made by `step` optimizer steps. The first version is 0, each set adds 1."""

    policy_version: int
    path: str
    sha256: str
    num_bytes: int
    step: int
