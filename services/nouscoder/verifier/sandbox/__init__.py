"""Sandboxes. `open_sandbox` and `open_backends` are the only place that chooses backends."""

from __future__ import annotations

from dataclasses import replace

from nouscoder.verifier.sandbox.base import (
    CompileFailed,
    CompileStarved,
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
from nouscoder.verifier.sandbox.config import PoolConfig, SandboxConfig, SpillOverConfig
from nouscoder.verifier.sandbox.spill_over import SpillOverSandbox

__all__ = [
    "CompileFailed",
    "CompileStarved",
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
    "SpillOverConfig",
    "SpillOverSandbox",
    "open_backends",
    "open_sandbox",
]


def open_backends(config: SandboxConfig) -> SpillOverSandbox:
    """The configured backend, and the one for spill-over if there is one, not yet started. Raises as `open_sandbox`."""
    chosen = config.spill_over
    sandboxes = [open_sandbox(config)]
    if chosen.backend:
        other = replace(config, backend=chosen.backend, slots=chosen.slots, tool_slots=0, spill_over=SpillOverConfig())
        sandboxes.append(open_sandbox(other))
    return SpillOverSandbox(sandboxes, chosen.after_s)


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
            from nouscoder.verifier.sandbox.runners.gvisor import GvisorSandbox

            return GvisorSandbox(config)
        case "modal":
            from nouscoder.verifier.sandbox.modal.backend import ModalSandbox

            return ModalSandbox(config)
        case other:
            raise ValueError(f"{other!r} is not a sandbox backend: use local, runsc, gvisor, modal or fake")
