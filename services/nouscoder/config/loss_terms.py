"""Settings that every objective shares: importance correction, KL to the reference, entropy, advantages."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from nouscoder.config.base import Section
from nouscoder.domain.advantage import Estimator, Overlong


class CorrectionKind(StrEnum):
    """How pi_old / pi_sampler enters the loss: the formulas are in learner/objectives/composition.py."""

    NONE = "none"
    TOKEN = "token"
    TOKEN_TRUNCATED = "token_truncated"
    SEQUENCE_TRUNCATED = "sequence_truncated"
    TOKEN_MASKED = "token_masked"
    SEQUENCE_MASKED = "sequence_masked"


class CorrectionSection(Section):
    """Correction of the difference between sampler and learner, by weights from pi_old / pi_sampler."""

    kind: CorrectionKind = Field(
        CorrectionKind.TOKEN_TRUNCATED,
        description="none; token: the ratio; token_truncated: min(cap, ratio) (TIS); sequence_truncated: min(cap,"
        " product over the rollout); token_masked: 0 outside floor..cap (IcePop); sequence_masked: 0 above cap (MIS)",
    )
    cap: float = Field(2.0, gt=0, allow_inf_nan=False, description="upper limit of the ratio")
    floor: float = Field(0.0, ge=0, allow_inf_nan=False, description="lower limit of the ratio, for token_masked")

    @model_validator(mode="after")
    def _limits(self) -> CorrectionSection:
        if self.floor and self.kind is not CorrectionKind.TOKEN_MASKED:
            raise ValueError("floor is for kind token_masked")
        if self.floor >= self.cap:
            raise ValueError("floor must be below cap")
        return self


class KlEstimator(StrEnum):
    """Schulman's estimators of the KL divergence: the formulas are in learner/objectives/composition.py."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class ReferenceKlSection(Section):
    """A penalty for the distance from the initial policy."""

    coefficient: float = Field(0.0, ge=0, description="weight of the KL to the initial policy in the loss; 0: none")
    estimator: KlEstimator = Field(KlEstimator.K3, description="k1, k2 or k3 of Schulman's estimators")


class EntropySection(Section):
    """An entropy bonus: fixed, or controlled towards a target (Skywork-OR1)."""

    coefficient: float = Field(0.0, ge=0, description="weight of the mean entropy; with a target only its start")
    target: float = Field(
        0.0, ge=0, description="nats: the bonus is on while the batch's entropy is at most this; 0: fixed coefficient"
    )
    delta: float = Field(5e-4, gt=0, description="with a target: change of the coefficient after each batch")
    maximum: float = Field(5e-3, gt=0, description="with a target: the coefficient stays between 0 and this")


class AdvantageSection(Section):
    """How rewards become advantages."""

    estimator: Estimator = Field(
        Estimator.GROUP_MEAN_STD,
        description="group_mean_std: (R - mean) / std; group_mean: R - mean; leave_one_out: R - mean of the others;"
        " batch_whitened: (R - mean) / std over the batch's rollouts; batch_token_whitened: weighted by tokens",
    )
    ddof: int = Field(0, ge=0, le=1, description="std divides by n - ddof: 0 population, 1 sample")
    overlong: Overlong = Field(
        Overlong.FILTERED,
        description="rollouts cut at max_new_tokens; filtered: advantage 0, counted in the loss's divisor;"
        " masked: left out of the loss and its divisor; kept: as any other",
    )
    length_weight: float = Field(
        0.0, ge=0, description="weight of Kimi k1.5's length reward, added before the estimator; 0: none"
    )

    @model_validator(mode="after")
    def _ddof_of_std(self) -> AdvantageSection:
        if self.ddof and self.estimator in (Estimator.GROUP_MEAN, Estimator.LEAVE_ONE_OUT):
            raise ValueError(f"ddof has no effect with estimator {self.estimator}: leave it at 0")
        return self


class DecayKind(StrEnum):
    """The learning rate after the warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"


class ScheduleSection(Section):
    """The learning rate over the steps of the run."""

    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up")
    decay: DecayKind = Field(DecayKind.CONSTANT, description="after the warm-up; cosine: falls until decay_steps")
    decay_steps: int = Field(0, ge=0, description="for cosine: the step, from the run's start, that reaches the floor")
    floor: float = Field(0.0, ge=0, le=1, description="for cosine: the lowest rate, as a share of learning_rate")

    @model_validator(mode="after")
    def _decay_steps(self) -> ScheduleSection:
        if self.decay is DecayKind.COSINE and self.decay_steps <= self.warmup_steps:
            raise ValueError("cosine needs decay_steps above warmup_steps")
        if self.decay is DecayKind.CONSTANT and (self.decay_steps or self.floor):
            raise ValueError("decay_steps and floor are for decay cosine")
        return self
