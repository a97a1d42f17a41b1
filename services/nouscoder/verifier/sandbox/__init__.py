"""Sandboxes. `open_sandbox` is the only place that chooses a backend."""

from __future__ import annotations

from nouscoder.verifier.sandbox.base import (
    CompileFailed,
    Dialogue,
    Exit,
    PartnerCompileFailed,
    Program,
    RunResult,
    Sandbox,
    SandboxError,
    SandboxUnavailable,
    Session,
)
from nouscoder.verifier.sandbox.config import PoolConfig, SandboxConfig

__all__ = [
    "CompileFailed",
    "Dialogue",
    "Exit",
    "PartnerCompileFailed",
    "PoolConfig",
    "Program",
    "RunResult",
    "Sandbox",
    "SandboxConfig",
    "SandboxError",
    "SandboxUnavailable",
    "Session",
    "open_sandbox",
]


def open_sandbox(config: SandboxConfig) -> Sandbox:
    """The configured backend, not yet started. Raises ValueError for an unknown name, and SandboxUnavailable."""
    match config.backend:
        case "local":
            from nouscoder.verifier.sandbox.local import LocalSandbox

            return LocalSandbox(config)
        case "fake":
            from nouscoder.verifier.sandbox.fake import FakeSandbox

            return FakeSandbox(num_slots=(config.slots or 2) + config.tool_slots)
        case "runsc":
            from nouscoder.verifier.sandbox.runsc import RunscSandbox

            return RunscSandbox(config)
        case "gvisor":
            from nouscoder.verifier.sandbox.gvisor import GvisorSandbox

            return GvisorSandbox(config)
        case other:
            raise ValueError(f"{other!r} is not a sandbox backend: use local, runsc, gvisor or fake")
