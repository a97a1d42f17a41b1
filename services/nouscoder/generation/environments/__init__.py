"""Environments. Only this module chooses one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nouscoder.generation.environments.base import Environment, EnvironmentUnusable
from nouscoder.policy_folder.tokenizer import TokenizerError, load_tokenizer

if TYPE_CHECKING:
    from nouscoder.config import Config

__all__ = ["open_environment"]


def open_environment(config: Config, policy_folder: Path) -> Environment:
    """The environment that `config.generation.environment` names. Raises EnvironmentUnusable."""
    from nouscoder.generation.environments.single_turn import SingleTurn

    try:
        tokenizer = load_tokenizer(policy_folder)
    except TokenizerError as error:
        raise EnvironmentUnusable(str(error)) from error
    return SingleTurn(tokenizer, config.generation.environment)
