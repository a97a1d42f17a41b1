"""Sandboxes. `open_sandbox` and `open_backends` are the only place that chooses backends.

The image of the sandbox builds init with this package and the standard library alone, so the configuration is imported
where it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nouscoder.verifier.sandbox.base import CompileFailed as CompileFailed
from nouscoder.verifier.sandbox.base import CompileStarved as CompileStarved
from nouscoder.verifier.sandbox.base import Dialogue as Dialogue
from nouscoder.verifier.sandbox.base import Exit as Exit
from nouscoder.verifier.sandbox.base import PartnerCompileFailed as PartnerCompileFailed
from nouscoder.verifier.sandbox.base import Program as Program
from nouscoder.verifier.sandbox.base import RunResult as RunResult
from nouscoder.verifier.sandbox.base import Sandbox as Sandbox
from nouscoder.verifier.sandbox.base import SandboxError as SandboxError
from nouscoder.verifier.sandbox.base import SandboxUnavailable as SandboxUnavailable
from nouscoder.verifier.sandbox.base import Session as Session
from nouscoder.verifier.sandbox.spill_over import SpillOverSandbox as SpillOverSandbox
from nouscoder.verifier.toolchains.libraries import CannotOffer, is_hidden, library_folders

if TYPE_CHECKING:
    from nouscoder.config import SandboxSection, VerifierSection


def open_backends(section: VerifierSection) -> SpillOverSandbox:
    """The configured backend, and the one for spill-over if there is one, not yet started. Raises as `open_sandbox`.

    Candidates import from the configured folders, then from those of the libraries. Raises ConfigError for a folder
    that does not exist.
    """
    from nouscoder.config import SpillOverSection

    config = with_libraries(section)
    chosen = config.spill_over
    sandboxes = [open_sandbox(config, section.tools.sessions)]
    if chosen.backend:
        changes = {"backend": chosen.backend, "slots": chosen.slots, "spill_over": SpillOverSection()}
        sandboxes.append(open_sandbox(config.model_copy(update=changes)))
    return SpillOverSandbox(sandboxes, chosen.after_s)


def with_libraries(section: VerifierSection) -> SandboxSection:
    """The sandbox's section, in which candidates also import from the folders of `verifier.libraries`.

    Runner pods and containers have libraries of their own. Raises ConfigError.
    """
    from nouscoder.config import ConfigError

    config = section.sandbox
    for folder in config.site_packages:
        if not folder.is_dir():
            raise ConfigError(f"verifier.sandbox.site_packages: {folder} is not a folder")
        if is_hidden(folder):
            raise ConfigError(f"verifier.sandbox.site_packages: {folder} is hidden by the sandbox's own folders")
    if not {config.backend, config.spill_over.backend} & {"local", "runsc"}:
        return config
    try:
        folders = (*config.site_packages, *library_folders(section.libraries))
    except CannotOffer as error:
        raise ConfigError(f"verifier.libraries: {error}") from error
    return config.model_copy(update={"site_packages": folders})


def open_sandbox(config: SandboxSection, tool_slots: int = 0) -> Sandbox:
    """The configured backend, not yet started, with `tool_slots` further slots for tool sessions.

    Raises SandboxUnavailable.
    """
    match config.backend:
        case "local":
            from nouscoder.verifier.sandbox.local import LocalSandbox

            return LocalSandbox(config, tool_slots=tool_slots)
        case "fake":
            from nouscoder.verifier.sandbox.fake import FakeSandbox

            return FakeSandbox(num_slots=(config.slots or 2) + tool_slots)
        case "runsc":
            from nouscoder.verifier.sandbox.runsc import RunscSandbox

            return RunscSandbox(config, tool_slots=tool_slots)
        case "gvisor":
            from nouscoder.verifier.sandbox.runners.pods import GvisorSandbox

            return GvisorSandbox(config, tool_slots=tool_slots)
        case "userns":
            from nouscoder.verifier.sandbox.runners.pods import UsernsSandbox

            return UsernsSandbox(config, tool_slots=tool_slots)
        case "modal":
            from nouscoder.verifier.sandbox.modal.backend import ModalSandbox

            return ModalSandbox(config, tool_slots=tool_slots)
