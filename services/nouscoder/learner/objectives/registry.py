"""The objectives: the gain of a token in each. Maps settings to objectives, and names the published configurations.

With r = pi_theta / pi_old, A the token's advantage, R rollouts of |o_i| loss tokens and N loss tokens in the minibatch,
the mean of the gain over tokens (token_mean) or rollouts (sequence_mean) is maximised (base.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from nouscoder.config import (
    Aggregation,
    CispoSettings,
    DapoSettings,
    DistillationSettings,
    GppoSettings,
    GrpoSettings,
    GspoSettings,
    LearnerSection,
    ObjectiveSettings,
    PpoSettings,
    Proximal,
    ReinforcePlusPlusSettings,
)
from nouscoder.learner.objectives.base import (
    Diagnostic,
    LossInputs,
    MinibatchCounts,
    Objective,
    ObjectiveTerms,
    Outside,
    SharedTerms,
    Surrogate,
    SurrogateObjective,
    bounded_exp,
    bounded_ratio,
    clipped,
    dual_clipped,
    means_of_rollouts,
)


@dataclass(frozen=True, slots=True)
class ClippedTokens(SurrogateObjective[DapoSettings | GrpoSettings | ReinforcePlusPlusSettings | PpoSettings]):
    """PPO's clip of each token's ratio: DAPO, GRPO, REINFORCE++ and PPO.

    Diagnostics: clip_fraction_low, clip_fraction_high, and clip_fraction_dual with a dual clip.

    DAPO: Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", arXiv 2503.14476: the objective
    is equation 8, its ratio and advantage equation 9, the decoupled clip equation 10 and the token-level mean equation
    12. Group advantages (equation 9) and dynamic sampling (equation 11) are computed before: see domain/advantage.py
    and the broker. To be maximised:

        1/N * sum over tokens of  w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

    NousCoder-14B: w = min(2, pi_old / pi_sampler), which is the default of learner.correction. The tokens of overlong
    rollouts have advantage 0: they add nothing to the sum, but they count in N.

    GRPO: Shao et al., "DeepSeekMath", arXiv 2402.03300, equation 3, with group advantages and e = 0.2:

        1/R * sum over rollouts i of 1/|o_i| * sum over tokens of  min(r * A, clip(r, 1 - e, 1 + e) * A) - beta * kl

    beta * kl is learner.reference_kl, off by default; the paper has beta = 0.04 and the estimator k3. GRPO+ (DeepCoder)
    is GRPO with clip_high = 0.28, aggregation token_mean and learner.advantage.overlong masked; it has no KL and no
    entropy bonus.

    REINFORCE++: Hu et al., "REINFORCE++", arXiv 2501.03262; AceCoder uses it. It is GRPO's formula without the KL, and
    A_i = (R_i - mean R) / std R over the batch: learner.advantage.estimator is batch_whitened, or batch_token_whitened
    as OpenRLHF computes it. The paper's optional KL in the reward of each token is not built; learner.reference_kl puts
    a KL in the loss instead.

    PPO: Schulman et al., arXiv 1707.06347, equation 7; decoupled by Hilton et al., arXiv 2110.00641, as AReaL uses it,
    arXiv 2505.24298, equation 5:

        proximal old      w * min(u * A, clip(u, 1 - e, 1 + e) * A),  u = pi_theta / pi_old,  w from pi_old / pi_sampler
        proximal sampler  min(u * A, clip(u, 1 - e, 1 + e) * A),      u = pi_theta / pi_sampler

    pi_old is the policy at the start of the batch. The decoupled form as published has learner.correction.kind token,
    that is w = pi_old / pi_sampler; other kinds bound it. The form with proximal sampler has no correction.
    """

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The clipped gain of each token, [tokens]."""
        settings = self.settings
        from_sampler = isinstance(settings, PpoSettings) and settings.proximal is Proximal.SAMPLER
        ratios = bounded_ratio(inputs.logprobs, inputs.sampler_logprobs if from_sampler else inputs.old_logprobs)
        return clipped(ratios, inputs.advantages, settings.clip_low, settings.clip_high, settings.dual_clip)


@dataclass(frozen=True, slots=True)
class Gspo(SurrogateObjective[GspoSettings]):
    """GSPO: one importance ratio for each rollout. Diagnostics: clip_fraction_low, clip_fraction_high, of tokens.

    Zheng et al., "Group Sequence Policy Optimization", arXiv 2507.18071, equations 5 and 7:

        s_i = exp(1/|o_i| * sum over tokens of log(pi_theta / pi_old))
        1/R * sum over rollouts i of  min(s_i * A_i, clip(s_i, 1 - clip_low, 1 + clip_high) * A_i)

    The gain of a rollout is repeated for each of its tokens, so that the mean over its tokens (aggregation
    sequence_mean) is the gain itself. GSPO+ (NousCoder-14B) weights rollouts by length, which is the mean over all
    tokens (aggregation token_mean):

        sum over rollouts of |o_i| * min(s_i * A_i, clip(...) * A_i) / sum over rollouts of |o_i|
    """

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The clipped gain of each token's rollout, [tokens]."""
        log_ratios = means_of_rollouts(inputs.logprobs - inputs.old_logprobs, inputs.rollout_of_token)
        return clipped(bounded_exp(log_ratios), inputs.advantages, self.settings.clip_low, self.settings.clip_high)


@dataclass(frozen=True, slots=True)
class Gppo(SurrogateObjective[GppoSettings]):
    """GPPO: the clip bounds the gradient of a token and does not remove it; plus the NLL of accepted rollouts.

    Diagnostics: bounded_fraction_low, bounded_fraction_high (tokens with a bounded gradient), and clip_fraction_dual.

    Su et al., "Klear-Reasoner", arXiv 2508.07629. With d = pi_theta / pi_old and sg = stop-gradient, the gain of a
    token is

        b1 * (1 - clip_low)  / sg(d) * d * A     where A < 0 and d < 1 - clip_low
        b2 * (1 + clip_high) / sg(d) * d * A     where A > 0 and d > 1 + clip_high
        d * A                                    elsewhere

    and its mean over the tokens of the minibatch is maximised. With dual_clip = c > 1 the gain is c * A, without
    gradient, where A < 0 and d > c. The paper has no dual clip; the authors' scripts have c = 10
    (Kwai-Klear/KlearReasoner, compute_gppo_loss_general_beta in verl/trainer/ppo/core_algos.py and
    recipe/dapo/perf_run_dapo_ours_code.sh).

    The loss also has alpha times the NLL of the rollouts whose tests all pass: -1/N+ * sum over their tokens of log
    pi_theta, with N+ their loss tokens in the minibatch (0 if none).
    """

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The gain of each token, [tokens]."""
        settings, advantages = self.settings, inputs.advantages
        ratios = bounded_ratio(inputs.logprobs, inputs.old_logprobs)
        outside = Outside.of(ratios, advantages, settings.clip_low, settings.clip_high)
        unit = torch.exp(inputs.logprobs - inputs.logprobs.detach())  # d / sg(d): 1, with the gradient of log pi_theta
        low, high = settings.beta_low * (1.0 - settings.clip_low), settings.beta_high * (1.0 + settings.clip_high)
        factors = torch.where(outside.low, low * unit, torch.where(outside.high, high * unit, ratios))
        gains = factors * advantages
        diagnostics = outside.diagnostics("bounded_fraction")
        if settings.dual_clip:
            gains = dual_clipped(gains, ratios, advantages, settings.dual_clip, diagnostics)
        return Surrogate(gains, diagnostics)

    def __call__(self, inputs: LossInputs, counts: MinibatchCounts) -> ObjectiveTerms:
        """The terms of one micro-batch, with the NLL of accepted rollouts."""
        terms = SurrogateObjective.__call__(self, inputs, counts)
        if not self.settings.positive_nll or not counts.num_accepted_tokens:
            return terms
        nll = -torch.where(inputs.accepted, inputs.logprobs, 0.0).sum() / counts.num_accepted_tokens
        return replace(terms, loss=terms.loss + self.settings.positive_nll * nll)


@dataclass(frozen=True, slots=True)
class Cispo(SurrogateObjective[CispoSettings]):
    """CISPO: REINFORCE on every token, with a clipped importance weight.

    Diagnostics: bounded_fraction_low, bounded_fraction_high (tokens with a clipped weight).

    MiniMax, "MiniMax-M1", arXiv 2506.13585, equations 4 and 5. With d = pi_theta / pi_old and sg = stop-gradient, the
    mean over the tokens of the minibatch is maximised of

        sg(clip(d, 1 - clip_low, 1 + clip_high)) * A * log pi_theta

    The paper has no lower bound (clip_low = 1) and tunes clip_high without naming its value.
    """

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The gain of each token, [tokens]."""
        low, high = 1.0 - self.settings.clip_low, 1.0 + self.settings.clip_high
        ratios = bounded_ratio(inputs.logprobs, inputs.old_logprobs).detach()
        gains = ratios.clamp(low, high) * inputs.advantages * inputs.logprobs
        return Surrogate(gains, Outside(ratios < low, ratios > high).diagnostics("bounded_fraction"))


@dataclass(frozen=True, slots=True)
class OnPolicyDistillation(SurrogateObjective[DistillationSettings]):
    """The policy learns from the log-probabilities that a teacher, the reference policy, gives to the policy's tokens.

    Diagnostic reverse_kl: log pi_old - log pi_teacher, whose mean estimates KL(pi_old || pi_teacher) of a token.

    K. Lu and Thinking Machines Lab, "On-Policy Distillation", 2025: the reverse KL of each token takes the place of the
    advantage. Agarwal et al., "On-Policy Distillation of Language Models" (GKD), arXiv 2306.13649: divergence on the
    student's own samples, here the reverse KL. To be maximised:

        1/N * sum over tokens of  r * (log pi_teacher - log pi_old + reward_weight * A)

    At pi_theta = pi_old its gradient is, in expectation over tokens of the policy, that of -KL(pi_theta || pi_teacher)
    of the next token at each position. The effect of a token on later ones is left out, as in both papers. A is the
    advantage of the verdicts, with weight 0 by default: then verdicts do not matter, and broker.drop_zero_variance
    should be false.
    """

    has_teacher: ClassVar[bool] = True

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The gain of each token, [tokens]. Raises ValueError without the teacher's log-probabilities."""
        if inputs.reference_logprobs is None:
            raise ValueError("distillation needs the log-probabilities of the teacher")
        reverse_kl = inputs.old_logprobs - inputs.reference_logprobs
        advantages = self.settings.reward_weight * inputs.advantages - reverse_kl
        ratios = bounded_ratio(inputs.logprobs, inputs.old_logprobs)
        return Surrogate(ratios * advantages, {"reverse_kl": Diagnostic(reverse_kl)})


OBJECTIVES: Mapping[type[ObjectiveSettings], Callable[[Any, SharedTerms], Objective]] = {
    DapoSettings: ClippedTokens,
    GrpoSettings: ClippedTokens,
    GspoSettings: Gspo,
    GppoSettings: Gppo,
    CispoSettings: Cispo,
    ReinforcePlusPlusSettings: ClippedTokens,
    PpoSettings: ClippedTokens,
    DistillationSettings: OnPolicyDistillation,
}

PUBLISHED: Mapping[str, ObjectiveSettings] = {
    "dapo": DapoSettings(),
    "grpo": GrpoSettings(),
    "grpo+": GrpoSettings(clip_high=0.28, aggregation=Aggregation.TOKEN_MEAN),
    "gspo": GspoSettings(),
    "gspo+": GspoSettings(aggregation=Aggregation.TOKEN_MEAN),
    "gppo": GppoSettings(),
    "cispo": CispoSettings(),
    "reinforce++": ReinforcePlusPlusSettings(),
    "ppo": PpoSettings(),
}


def objective_of(section: LearnerSection) -> Objective:
    """The objective that the learner's section configures."""
    return OBJECTIVES[type(section.objective)](section.objective, SharedTerms.of(section))
