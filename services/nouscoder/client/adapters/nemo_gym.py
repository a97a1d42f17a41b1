"""The reward of NeMo Gym's resources server, for the `verify` of a class under its SimpleResourcesServer.

NeMo Gym takes an exception of `verify` for a failed request, and its JudgeError for a rollout without a reward. A
reward of 0 would be trained on, so this module raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from nouscoder.client.adapters import score_of
from nouscoder.client.async_client import AsyncClient
from nouscoder.client.records import Rules


async def reward(
    client: AsyncClient, response: Mapping[str, Any], tests: Mapping[str, Any] | str, **rules: Unpack[Rules]
) -> float:
    """1 for a right program, else 0. `response` is `body.response.model_dump()`: the model's answer, of OpenAI's form.

    Raises GradingFailed when there is no verdict.
    """
    return score_of(await client.grade(completion=answer_text(response), tests=tests, **rules))


def answer_text(response: Mapping[str, Any]) -> str:
    """The text of the last message of the assistant; "" when there is none. Reasoning and tool calls are not taken."""
    for item in reversed(response.get("output") or []):
        if item.get("type") == "message" and item.get("role", "assistant") == "assistant":
            parts = item.get("content") or []
            return "".join(part.get("text") or "" for part in parts if part.get("type") == "output_text")
    return ""
