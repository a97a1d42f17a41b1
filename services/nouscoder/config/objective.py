"""Settings of the objectives: one section an objective, chosen by `learner.objective.name`, and those that all share.

The defaults are the published values. learner/objectives/registry.py has the formula and the source of each objective.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from nouscoder.config.base import InputFile, Section, chosen_by
from nouscoder.domain.advantage import Estimator, Overlong


class Aggregation(StrEnum):
    """How the values of loss tokens become one loss: the formulas are in learner/objectives/base.py."""

    TOKEN_MEAN = "token_mean"
    SEQUENCE_MEAN = "sequence_mean"
    FIXED_DIVISOR = "fixed_divisor"


class Proximal(StrEnum):
    """The policy in the denominator of PPO's clipped ratio."""

    OLD = "old"
    SAMPLER = "sampler"


_NAMES = "dapo, grpo, gspo, gppo, cispo, reinforce_plus_plus, ppo, distillation"


def _name(name: str) -> Any:
    return Field(name, description=f"the objective, one of {_NAMES}; docs/recipes.md has the keys and defaults of each")


def _clip_low(default: float) -> Any:
    return Field(default, gt=0, lt=1, description="ratios are clipped from below at 1 - clip_low")


def _clip_high(default: float) -> Any:
    return Field(default, gt=0, description="ratios are clipped from above at 1 + clip_high")


def _aggregation(default: Aggregation) -> Any:
    return Field(
        default,
        description="token_mean: over all loss tokens; sequence_mean: over the tokens of each rollout, then over"
        " rollouts; fixed_divisor: the sum over tokens by rollouts * divisor_tokens",
    )


class _ObjectiveSection(Section):
    """Settings of every objective."""

    aggregation: Aggregation = _aggregation(Aggregation.TOKEN_MEAN)
    divisor_tokens: int = Field(
        0, ge=0, description="for fixed_divisor: tokens by which each rollout's sum is divided, as the longest length"
    )

    def _faults(self) -> Iterator[str]:
        if (self.aggregation is Aggregation.FIXED_DIVISOR) != (self.divisor_tokens > 0):
            yield "divisor_tokens is for aggregation fixed_divisor, which needs it"


class ClippedSettings(_ObjectiveSection):
    """Settings of the objectives with PPO's clip."""

    clip_low: float = _clip_low(0.2)
    clip_high: float = _clip_high(0.2)
    dual_clip: float = Field(
        0.0, ge=0, description="c > 1: a token with a negative advantage loses at most c * advantage; 0: no bound"
    )

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        if 0 < self.dual_clip <= 1 + self.clip_high:
            yield "dual_clip must be above 1 + clip_high, or 0 for none"


class DapoSettings(ClippedSettings):
    """DAPO (NousCoder-14B): PPO's clip with a higher upper side, mean over tokens."""

    name: Literal["dapo"] = _name("dapo")
    clip_high: float = _clip_high(0.28)


class GrpoSettings(ClippedSettings):
    """GRPO (DeepSeekMath): PPO's clip, mean over the tokens of each rollout; GRPO+ sets clip_high and token_mean."""

    name: Literal["grpo"] = _name("grpo")
    aggregation: Aggregation = _aggregation(Aggregation.SEQUENCE_MEAN)


class GspoSettings(_ObjectiveSection):
    """GSPO: one clipped ratio for each rollout. GSPO+ is GSPO with aggregation token_mean."""

    name: Literal["gspo"] = _name("gspo")
    clip_low: float = _clip_low(3e-4)
    clip_high: float = _clip_high(4e-4)
    aggregation: Aggregation = _aggregation(Aggregation.SEQUENCE_MEAN)


class GppoSettings(ClippedSettings):
    """GPPO (Klear-Reasoner): clipped tokens keep a bounded gradient; plus the NLL of accepted rollouts."""

    name: Literal["gppo"] = _name("gppo")
    clip_high: float = _clip_high(0.28)
    beta_low: float = Field(1.0, ge=0, description="b1: factor on tokens below the clip with a negative advantage")
    beta_high: float = Field(1.0, ge=0, description="b2: factor on tokens above the clip with a positive advantage")
    positive_nll: float = Field(0.1, ge=0, description="alpha: weight of the NLL of accepted rollouts; 0: none")


class CispoSettings(_ObjectiveSection):
    """CISPO (MiniMax-M1): REINFORCE with a clipped importance weight. The paper names no value of clip_high."""

    name: Literal["cispo"] = _name("cispo")
    clip_low: float = Field(1.0, gt=0, le=1, description="weights are clipped from below at 1 - clip_low; 1: none")
    clip_high: float = _clip_high(0.28)


class ReinforcePlusPlusSettings(ClippedSettings):
    """REINFORCE++ (AceCoder): PPO's clip without a critic; set learner.advantage.estimator to batch_whitened."""

    name: Literal["reinforce_plus_plus"] = _name("reinforce_plus_plus")
    aggregation: Aggregation = _aggregation(Aggregation.SEQUENCE_MEAN)


class PpoSettings(ClippedSettings):
    """PPO's clip, with the proximal policy decoupled from the sampler (AReaL) or not."""

    name: Literal["ppo"] = _name("ppo")
    proximal: Proximal = Field(
        Proximal.OLD, description="denominator of the ratio; old: the policy at the batch's start; sampler: as sampled"
    )


class DistillationSettings(_ObjectiveSection):
    """On-policy distillation: the reverse KL to a teacher takes the place of the advantage."""

    name: Literal["distillation"] = _name("distillation")
    teacher: InputFile = Field(
        description="for distillation: the teacher's Hugging Face folder, with the same tokenizer"
    )
    reward_weight: float = Field(
        0.0, ge=0, description="for distillation: weight of the advantage of verdicts beside the teacher; 0: none"
    )


ObjectiveSettings = Annotated[
    Annotated[DapoSettings, Tag("name=dapo")]
    | Annotated[GrpoSettings, Tag("name=grpo")]
    | Annotated[GspoSettings, Tag("name=gspo")]
    | Annotated[GppoSettings, Tag("name=gppo")]
    | Annotated[CispoSettings, Tag("name=cispo")]
    | Annotated[ReinforcePlusPlusSettings, Tag("name=reinforce_plus_plus")]
    | Annotated[PpoSettings, Tag("name=ppo")]
    | Annotated[DistillationSettings, Tag("name=distillation")],
    chosen_by("name", "dapo", _NAMES, "objective_name"),
]


class CorrectionKind(StrEnum):
    """How pi_old / pi_sampler enters the loss: the formulas are in learner/objectives/base.py."""

    NONE = "none"
    TOKEN = "token"
    TOKEN_TRUNCATED = "token_truncated"
    SEQUENCE_TRUNCATED = "sequence_truncated"
    GEOMETRIC_TRUNCATED = "geometric_truncated"
    TOKEN_MASKED = "token_masked"
    SEQUENCE_MASKED = "sequence_masked"


class CorrectionSection(Section):
    """Correction of the difference between sampler and learner, by weights from pi_old / pi_sampler."""

    kind: CorrectionKind = Field(
        CorrectionKind.TOKEN_TRUNCATED,
        description="none; token: the ratio; token_truncated: min(cap, ratio) (TIS); sequence_truncated: min(cap,"
        " product over the rollout); geometric_truncated: min(cap, geometric mean over the rollout), as GSPO's ratio;"
        " token_masked: 0 outside floor..cap (IcePop); sequence_masked: 0 above cap (MIS)",
    )
    cap: float = Field(2.0, gt=0, allow_inf_nan=False, description="upper limit of the ratio")
    floor: float = Field(0.0, ge=0, allow_inf_nan=False, description="lower limit of the ratio, for token_masked")

    def _faults(self) -> Iterator[str]:
        if self.floor and self.kind is not CorrectionKind.TOKEN_MASKED:
            yield "floor is for kind token_masked"
        if self.floor >= self.cap:
            yield "floor must be below cap"


class KlEstimator(StrEnum):
    """Schulman's estimators of the KL divergence: the formulas are in learner/objectives/base.py."""

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
    epsilon: float = Field(0.0, ge=0, allow_inf_nan=False, description="added to the std; verl's GRPO has 1e-6")
    mask_equal_rewards: bool = Field(
        False,
        description="groups of equal rewards are left out of the loss and its divisor, and no others take their place,"
        " as verl's rejection of samples; for broker.drop_zero_variance false, which keeps them in the batch",
    )
    length_weight: float = Field(
        0.0, ge=0, description="weight of Kimi k1.5's length reward, added before the estimator; 0: none"
    )

    def _faults(self) -> Iterator[str]:
        if self.mask_equal_rewards and self.estimator.is_of_batch:
            yield f"mask_equal_rewards is for estimators of a group: with {self.estimator} such groups have a signal"
        if (self.ddof or self.epsilon) and self.estimator in (Estimator.GROUP_MEAN, Estimator.LEAVE_ONE_OUT):
            yield f"ddof and epsilon have no effect with estimator {self.estimator}: leave them at 0"


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

    def _faults(self) -> Iterator[str]:
        if self.decay is DecayKind.COSINE and self.decay_steps <= self.warmup_steps:
            yield "cosine needs decay_steps above warmup_steps"
        if self.decay is DecayKind.CONSTANT and (self.decay_steps or self.floor):
            yield "decay_steps and floor are for decay cosine"
