"""The scores of a reward model beside the verified rewards (learner.reward_model), as AceCoder trains with one.

The scores are whitened over the batch, because they have no zero and no unit, and then added to the rewards that
advantages are made of. The correlation of scores and verified rewards tells when a policy learns to please the model
and not the tests (the guard reward_hacking).

INVARIANT: verified rewards never change: logs, statistics and saved batches hold them alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from nouscoder.config import LearnerSection, RewardModelSection
from nouscoder.domain.batch import Batch
from nouscoder.domain.estimates import correlation
from nouscoder.domain.rollout import Rollout
from nouscoder.domain.signal import has_signal
from nouscoder.learner.model.reference import check_same_tokens
from nouscoder.policy_folder.tokenizer import PolicyTokenizer
from nouscoder.reward_model.model import end_token_of, load_reward_model, scores_of


@dataclass(frozen=True, slots=True)
class ModelTerms:
    """What a reward model adds to the rewards of a batch, by rollout, and how far it agrees with the verdicts."""

    by_rollout: dict[str, float] = field(default_factory=dict)
    correlation: float | None = None


class ModelRewards:
    """The reward model that the settings name, if any. `policy` is the folder whose tokens rollouts have."""

    def __init__(self, policy: Path, device: torch.device) -> None:
        self._policy = policy
        self._device = device
        self._settings = RewardModelSection()
        self._row_tokens = 0
        self._model: PreTrainedModel | None = None
        self._tokenizer: PolicyTokenizer | None = None

    def use(self, settings: LearnerSection) -> None:
        """Use the model of these settings from now on. Raises Unusable when it cannot be used for the policy."""
        if settings.reward_model.path != self._settings.path:
            self._model = None
            if settings.reward_model.path:
                folder = Path(settings.reward_model.path)
                self._tokenizer = check_same_tokens(self._policy, folder, "reward model")
                self._model = load_reward_model(folder).to(self._device)  # type: ignore[arg-type]
                self._model.train(False)
        self._settings, self._row_tokens = settings.reward_model, settings.microbatch_tokens

    def terms(self, batch: Batch) -> ModelTerms:
        """The terms of a batch; none without a model."""
        if self._model is None or self._tokenizer is None:
            return ModelTerms()
        answers = [_ended(graded.rollout, self._tokenizer) for graded in batch.rollouts]
        scores = scores_of(self._model, answers, self._row_tokens)
        agreement = correlation(scores, [graded.reward for graded in batch.rollouts])
        names = [graded.rollout.rollout_id for graded in batch.rollouts]
        terms = [self._settings.weight * value for value in whitened(scores)] if self._settings.weight else []
        return ModelTerms(dict(zip(names, terms, strict=False)), agreement)


def whitened(values: Sequence[float]) -> list[float]:
    """(value - mean) / standard deviation of each; zeros when all are equal but for rounding."""
    if not has_signal(values):
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    return [(value - mean) / deviation for value in values]


def _ended(rollout: Rollout, tokenizer: PolicyTokenizer) -> list[int]:
    """The rollout's tokens as the reward model was trained on them: with its end token at the end."""
    ids = list(rollout.token_ids)
    if ids[-1] in tokenizer.stop_ids:
        ids.pop()
    return [*ids, end_token_of(tokenizer)]
