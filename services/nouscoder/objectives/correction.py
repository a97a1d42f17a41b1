"""The correction of the difference between sampler and learner: a weight for each token, without gradient.

With k_t = pi_old / pi_sampler of a token, K_i = product of k_t over rollout i, and G_i = exp(mean of log k_t over
rollout i):

    none                w_t = 1
    token               w_t = k_t                        decoupled PPO, AReaL, arXiv 2505.24298, equation 5
    token_truncated     w_t = min(C, k_t)                truncated importance sampling (TIS), Yao et al. 2025,
                                                         "Your Efficient RL Framework Secretly Brings You Off-Policy"
    sequence_truncated  w_t = min(C, K_i)                the same with the weight of the whole rollout
    geometric_truncated w_t = min(C, G_i)                the same with GSPO's ratio of a rollout (arXiv 2507.18071,
                                                         equation 7), as NousCoder-14B's report defines it
    token_masked        w_t = k_t if f <= k_t <= C, else 0   IcePop, Ling team 2025 (f = 0.5, C = 5)
    sequence_masked     w_t = K_i if K_i <= C, else 0    sequence MIS, Liu et al. 2025, "When Speed Kills Stability"
    entry_point         w_t is the result of a function of the user

C is cap and f is floor. log k_t, log K_i and log G_i are clipped to +-20.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

from pydantic import Field

from nouscoder.entry_points import PATTERN, load_entry_point
from nouscoder.errors import Unusable
from nouscoder.objectives.base import Diagnostic, LossInputs, bounded_exp, means_of_rollouts, sums_of_rollouts
from nouscoder.sections import Options, Section

if TYPE_CHECKING:
    from nouscoder.objectives.base import Tensor

    UsersCorrection = Callable[[LossInputs, Mapping[str, str | int | float | bool]], Tensor]


class CorrectionKind(StrEnum):
    """How pi_old / pi_sampler enters the loss."""

    NONE = "none"
    TOKEN = "token"
    TOKEN_TRUNCATED = "token_truncated"
    SEQUENCE_TRUNCATED = "sequence_truncated"
    GEOMETRIC_TRUNCATED = "geometric_truncated"
    TOKEN_MASKED = "token_masked"
    SEQUENCE_MASKED = "sequence_masked"
    ENTRY_POINT = "entry_point"


_OF_SEQUENCE = (CorrectionKind.SEQUENCE_TRUNCATED, CorrectionKind.SEQUENCE_MASKED)
_MASKED = (CorrectionKind.TOKEN_MASKED, CorrectionKind.SEQUENCE_MASKED)


class CorrectionSection(Section):
    """Correction of the difference between sampler and learner, by weights from pi_old / pi_sampler."""

    kind: CorrectionKind = Field(
        CorrectionKind.TOKEN_TRUNCATED,
        description="none; token: the ratio; token_truncated: min(cap, ratio) (TIS); sequence_truncated: min(cap,"
        " product over the rollout); geometric_truncated: min(cap, geometric mean over the rollout), as GSPO's ratio;"
        " token_masked: 0 outside floor..cap (IcePop); sequence_masked: 0 above cap (MIS); entry_point: a function of"
        " the user",
    )
    cap: float = Field(2.0, gt=0, allow_inf_nan=False, description="upper limit of the ratio")
    floor: float = Field(0.0, ge=0, allow_inf_nan=False, description="lower limit of the ratio, for token_masked")
    entry_point: str = Field(
        "",
        pattern=f"^$|{PATTERN}",
        description="for entry_point: package.module:function, called with the inputs of the loss and `options`",
    )
    options: Options = Field({}, description="options of the function, passed to it unchecked")

    def _faults(self) -> Iterator[str]:
        if self.floor and self.kind is not CorrectionKind.TOKEN_MASKED:
            yield "floor is for kind token_masked"
        if self.floor >= self.cap:
            yield "floor must be below cap"
        if bool(self.entry_point) != (self.kind is CorrectionKind.ENTRY_POINT):
            yield "entry_point is for kind entry_point, which needs it"

    def users_function(self) -> UsersCorrection:
        """The function of kind entry_point. Raises Unusable."""
        function = load_entry_point("learner.correction.entry_point", self.entry_point)
        if not callable(function):
            raise Unusable(f"learner.correction.entry_point {self.entry_point!r} is not a function")
        weights: UsersCorrection = function
        return weights

    def weights(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Diagnostic]]:
        """(weights [tokens], which stand outside the clip; diagnostics over tokens).

        mismatch_truncated and mismatch_masked are the shares of tokens whose weight a limit changed. Raises Unusable
        when a user's function gives another shape.
        """
        if self.kind is CorrectionKind.NONE:
            return inputs.old_logprobs.new_ones(inputs.old_logprobs.shape), {}
        if self.kind is CorrectionKind.ENTRY_POINT:
            return self._of_user(inputs), {}
        log_ratios = (inputs.old_logprobs - inputs.sampler_logprobs).detach()
        if self.kind in _OF_SEQUENCE:
            log_ratios = sums_of_rollouts(log_ratios, inputs.rollout_of_token)
        elif self.kind is CorrectionKind.GEOMETRIC_TRUNCATED:
            log_ratios = means_of_rollouts(log_ratios, inputs.rollout_of_token)
        ratios = bounded_exp(log_ratios)
        if self.kind is CorrectionKind.TOKEN:
            return ratios, {}
        if self.kind in _MASKED:
            outside = (ratios > self.cap) | (ratios < self.floor)
            return ratios.masked_fill(outside, 0.0), {"mismatch_masked": Diagnostic(outside)}
        return ratios.clamp(max=self.cap), {"mismatch_truncated": Diagnostic(ratios > self.cap)}

    def _of_user(self, inputs: LossInputs) -> Tensor:
        weights = self.users_function()(inputs, self.options).detach()
        if weights.shape != inputs.old_logprobs.shape:
            raise Unusable(
                f"learner.correction.entry_point {self.entry_point!r} gave weights of shape {list(weights.shape)}:"
                f" expected one for each of {len(inputs.old_logprobs)} tokens"
            )
        return weights
