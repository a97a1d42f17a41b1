"""What only a model library can tell before a run starts: a process of its own loads it, and answers in JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from nouscoder.config import Config, ConfigError
from nouscoder.errors import NousCoderError

_START_LIMIT_S = 120.0
_ADAPTERS = "nouscoder.learner.model.adapters:say_stdin"
_TOKENS = "nouscoder.learner.model.reference:say_stdin"


class CannotCount(NousCoderError):
    """The tokens of prompts, or the weights with adapters, cannot be counted. The message says why."""


@cache
def _answer_about_adapters(folder: str, settings: str) -> dict[str, str]:
    return asked_of_models(_ADAPTERS, {"folder": folder, "settings": json.loads(settings)}, 0.0)


def adapter_lines(config: Config) -> list[str]:
    """What adapters reach of the policy, and what stays frozen. Raises ConfigError for adapters that it cannot have."""
    lora = config.learner.lora
    if not lora.rank:
        return []
    try:
        answer = _answer_about_adapters(str(config.in_run_folder(config.policy.path)), lora.model_dump_json())
    except CannotCount as error:
        raise ConfigError(f"learner.lora: the policy's layers cannot be read: {error}") from error
    if "fault" in answer:
        raise ConfigError(answer["fault"])
    return [answer["sentence"]]


def adapter_faults(config: Config) -> list[str]:
    """What keeps adapters from the policy: one sentence, or none."""
    try:
        adapter_lines(config)
    except ConfigError as error:
        return [str(error)]
    return []


def token_faults(config: Config) -> list[str]:
    """A teacher or a reward model that has other tokens than the policy: one sentence, or none."""
    named = {"teacher": config.learner.teacher, "reward model": config.learner.reward_model.path}
    if not (others := {role: folder for role, folder in named.items() if folder}):
        return []
    policy = str(config.in_run_folder(config.policy.path))
    answer = asked_of_models(_TOKENS, {"policy": policy, "others": others}, 0.0)
    return [f"learner: {fault}" for fault in answer.values()]


def asked_of_models(function: str, request: Mapping[str, Any], more_s: float) -> dict[str, Any]:
    """The answer in JSON of `module:function` to the request on stdin, in a process of its own."""
    module, name = function.split(":")
    command = [sys.executable, "-c", f"from {module} import {name}; {name}()"]
    limit_s = _START_LIMIT_S + more_s
    try:
        ended = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise CannotCount(f"no answer within {limit_s:.0f} s") from error
    if ended.returncode:
        raise CannotCount((ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1])
    answer: dict[str, Any] = json.loads(ended.stdout)
    return answer
