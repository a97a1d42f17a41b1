"""Environments. Only this module chooses one."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from nouscoder.config.generation import AgentSection, EntryPointSection, InterpreterSection, ToolsSection
from nouscoder.generation.environments.agent import Agent, AgentSessions
from nouscoder.generation.environments.base import Environment, EnvironmentUnusable
from nouscoder.generation.environments.prompts import SingleTurn
from nouscoder.generation.environments.tools import Tools
from nouscoder.generation.environments.with_tools import Feedback, WithInterpreter
from nouscoder.policy_folder.tokenizer import PolicyTokenizer, TokenizerError, load_tokenizer

if TYPE_CHECKING:
    from nouscoder.config import Config

__all__ = ["open_environment"]


def open_environment(
    config: Config, policy_folder: Path, tools: Tools | None = None, sessions: AgentSessions | None = None
) -> Environment:
    """The environment that `config.generation.environment` names. Raises EnvironmentUnusable."""
    settings, max_tokens_total = config.generation.environment, config.generation.max_tokens_total
    try:
        tokenizer = load_tokenizer(policy_folder, settings.date)
    except TokenizerError as error:
        raise EnvironmentUnusable(str(error)) from error
    if isinstance(settings, AgentSection):
        return Agent(tokenizer, settings, sessions or AgentSessions(), max_tokens_total)
    if not isinstance(settings, ToolsSection):
        return SingleTurn(tokenizer, settings)
    if tools is None:
        raise EnvironmentUnusable(f"generation.environment.kind {settings.kind} needs tools")
    if isinstance(settings, EntryPointSection):
        return _users(settings, tokenizer, tools, max_tokens_total)
    if isinstance(settings, InterpreterSection):
        return WithInterpreter(tokenizer, settings, tools, max_tokens_total)
    return Feedback(tokenizer, settings, tools, max_tokens_total)


def _users(settings: EntryPointSection, tokenizer: PolicyTokenizer, tools: Tools, max_tokens_total: int) -> Environment:
    """The user's environment. Whatever its module or its constructor raises is an EnvironmentUnusable."""
    module, _, name = settings.entry_point.partition(":")
    try:
        made: Environment = getattr(importlib.import_module(module), name)(tokenizer, settings, tools, max_tokens_total)
    except Exception as error:
        raise EnvironmentUnusable(
            f"generation.environment.entry_point {settings.entry_point!r} cannot be used: {error!r}"
        ) from error
    return made
