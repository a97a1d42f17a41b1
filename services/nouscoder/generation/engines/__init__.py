"""Engines, and the one place that chooses among them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nouscoder.generation.engines.base import Engine, EngineError

if TYPE_CHECKING:
    from nouscoder.config import Config

__all__ = ["Engine", "EngineError", "open_engine"]


def open_engine(config: Config, policy_folder: Path | None = None) -> Engine:
    """The engine that `config.generation.engine` names, without weights yet. Raises EngineUnusable.

    Architecture and tokenizer are those in `policy_folder`, None: where config.policy says.
    """
    generation = config.generation
    if generation.engine == "fake":
        from nouscoder.generation.engines.fake import FakeEngine

        return FakeEngine(max_running=generation.max_running, max_tokens_total=generation.max_tokens_total)
    from nouscoder.generation.engines.torch import TorchEngine

    return TorchEngine(
        policy_folder or config.in_run_folder(config.policy.path),
        max_running=generation.max_running,
        max_tokens_total=generation.max_tokens_total,
        device=generation.device,
        threads=generation.threads,
    )
