"""Converts the configuration of the verifier to the settings of its parts."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from nouscoder.config import ConfigError, ModalSection, TestsSection, ToolSessionsSection, VerifierSection
from nouscoder.verifier.grading.grader import GradingPolicy
from nouscoder.verifier.sandbox import PoolConfig, SandboxConfig, SpillOverConfig
from nouscoder.verifier.sandbox.modal_config import ContainerFor, ModalConfig
from nouscoder.verifier.toolchains.libraries import library_folders
from nouscoder.verifier.tools.sessions import ToolPolicy


def cache_folder(section: TestsSection) -> Path:
    """The folder of fetched tests."""
    return Path(section.cache or Path(tempfile.gettempdir()) / f"nouscoder-tests-{os.getuid()}")


def grading_policy(section: VerifierSection) -> GradingPolicy:
    """The limits of grading."""
    return GradingPolicy(
        max_queue=section.max_queue, max_submission_s=section.max_submission_s, tool_slots=section.tools.sessions
    )


def tool_policy(section: ToolSessionsSection) -> ToolPolicy:
    """The bounds of tool sessions."""
    return ToolPolicy(section.sessions, section.calls, section.call_s, section.idle_s, section.memory_bytes)


def sandbox_config(section: VerifierSection) -> SandboxConfig:
    """The settings of the sandbox. Candidates import from the configured folders, then from those of the libraries.

    Raises ConfigError naming the invalid key.
    """
    chosen = section.sandbox
    folders = (*chosen.site_packages, *library_folders(section.libraries))
    try:
        return SandboxConfig(
            chosen.backend,
            chosen.slots,
            chosen.python,
            folders,
            tool_slots=section.tools.sessions,
            runsc=chosen.runsc,
            max_sessions=chosen.max_sessions,
            compile_cache_bytes=chosen.compile_cache_bytes,
            pool=PoolConfig(
                managed=chosen.pool_managed,
                template=chosen.pool_template,
                service=chosen.pool_service,
                port=chosen.pool_port,
                key_file=chosen.pool_key_file,
                spares=chosen.pool_spares,
                least=None if chosen.pool_min < 0 else chosen.pool_min,
                idle_s=chosen.pool_idle_s,
                accept_unproven_kernel=chosen.pool_accept_unproven_kernel,
                start_s=chosen.pool_start_s,
            ),
            modal=_modal_config(chosen.modal),
            spill_over=SpillOverConfig(chosen.spill_over.backend, chosen.spill_over.slots, chosen.spill_over.after_s),
        )
    except ValueError as error:
        raise ConfigError(f"verifier.sandbox.{error}") from error


def _modal_config(section: ModalSection) -> ModalConfig:
    values = section.model_dump()
    return ModalConfig(**{**values, "container_for": ContainerFor(section.container_for)})


def not_served(section: VerifierSection, with_broker: bool) -> list[str]:
    """What this service does not do, each with the key or option that turns it on."""
    off = {
        "REST API and playground (--http HOST:PORT)": not section.http,
        "jobs (verifier.jobs.folder)": not section.jobs.folder,
        "tool sessions (verifier.tools.sessions)": not section.tools.sessions,
        "rollouts of a broker (--broker)": not with_broker,
        "TLS (verifier.tls)": not section.tls.certificate,
        "audit log (verifier.audit_log)": not section.audit_log,
        "traces (verifier.tracing_endpoint)": not section.tracing_endpoint,
    }
    return [name for name, is_off in off.items() if is_off]
