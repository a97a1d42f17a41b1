"""The score of one answer for verl's `custom_reward_function`.

verl can also use the service without this package: `reward_model.sandbox_fusion.url` is the URL of POST /run_code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from nouscoder.client.adapters import score_of
from nouscoder.client.records import Rules
from nouscoder.client.sync_client import Client


def compute_score(client: Client, solution: str, tests: Mapping[str, Any] | str, **rules: Unpack[Rules]) -> float:
    """1 for a right program, else 0. `tests` is verl's `ground_truth`, a record or JSON text.

    Raises GradingFailed when there is no verdict, so that the step fails instead of training on a wrong score.
    """
    return score_of(client.grade(completion=solution, tests=tests, **rules))
