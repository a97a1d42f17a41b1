"""Whether a proposal is accepted, and its reward, from what programs printed. Pure.

The outputs of a program are one text for each input; None where it failed. Two outputs are equal when their words are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from nouscoder.domain.curriculum import potential

Outputs = Sequence[str | None]


class Rejection(StrEnum):
    """Why a proposal is not accepted."""

    NO_PROPOSAL = "no proposal"
    TOO_LONG = "too long"
    FEW_INPUTS = "too few inputs"
    NEAR_DUPLICATE = "near-duplicate"
    REFERENCE_FAILS = "the reference fails"
    CONSTANT_OUTPUT = "the output is always the same"
    NOT_DETERMINISTIC = "not deterministic"
    OTHER_ANSWER = "the solvers agree on another answer"
    FEW_AGREE = "too few solvers agree"
    ALWAYS_SOLVED = "always solved"


class Rejected(Exception):
    """A proposal is not accepted. The text says why in detail."""

    def __init__(self, reason: Rejection, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of one proposal. `reason` is None when it is accepted.

    `pass_rate` is the share of the solver's samples that print what the reference prints; None when nobody tried.
    """

    reason: Rejection | None
    detail: str = ""
    pass_rate: float | None = None

    @property
    def reward(self) -> float:
        """The proposer's reward: learnability 4p(1 - p) of an accepted problem, from 0 to 1, else 0."""
        return potential(self.pass_rate) if self.reason is None and self.pass_rate is not None else 0.0


def check_reference(outputs: Outputs) -> None:
    """Raises Rejected unless the reference printed something for each input, and not the same for all."""
    failed = sum(output is None for output in outputs)
    if failed:
        raise Rejected(Rejection.REFERENCE_FAILS, f"on {failed} of {len(outputs)} inputs")
    if len(set(_words(outputs))) < 2:
        raise Rejected(Rejection.CONSTANT_OUTPUT, f"on {len(outputs)} inputs")


def judged(reference: Outputs, solvers: Sequence[Outputs], agree: int) -> Judgement:
    """The judgement on a valid reference by independent samples of the solver.

    The reference's answer must be the most frequent one among the samples without a failure, with at least `agree`
    samples, and some sample must fail to give it.
    """
    wanted = _words(reference)
    answers = Counter(_words(outputs) for outputs in solvers if None not in outputs)
    agreeing = answers[wanted]
    rate = agreeing / len(solvers)
    others = max((count for answer, count in answers.items() if answer != wanted), default=0)
    if others > agreeing and others >= agree:
        detail = f"{others} of {len(solvers)} give another answer, {agreeing} that of the reference"
        return Judgement(Rejection.OTHER_ANSWER, detail, rate)
    if agreeing < agree:
        return Judgement(Rejection.FEW_AGREE, f"{agreeing} of {len(solvers)}", rate)
    if agreeing == len(solvers):
        return Judgement(Rejection.ALWAYS_SOLVED, f"by all {len(solvers)}", rate)
    return Judgement(None, "", rate)


def _words(outputs: Outputs) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple((output or "").split()) for output in outputs)
