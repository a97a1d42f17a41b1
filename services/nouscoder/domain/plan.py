"""A plan trains in stages, one run after the other. Which stage is next, from which policy, and when a stage is over.

All decisions follow from the history of the stages, which is read from the disk. So a plan that was killed continues
with the same decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from nouscoder.domain.signal import SCORE_DIGITS


class StartFrom(StrEnum):
    """The policy of the stage before that a stage begins with: the last one, or the best by evaluation."""

    LAST = "last"
    BEST = "best"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """pass@1 of a policy version of a run on the held-out problems. Version 0 is what the run began with."""

    policy_version: int
    pass_at_1: float


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """What ends a run before its last batch; 0 means that it does not.

    pass_at_1  an evaluation that is at least this high
    no_gain    this many evaluations, one after the other, that are not above the best one before them
    """

    pass_at_1: float = 0.0
    no_gain: int = 0

    def reason(self, evaluations: Sequence[Evaluated]) -> str | None:
        """Why the run is over, None when it is not. `evaluations` are in order of their versions."""
        scores = [round(evaluated.pass_at_1, SCORE_DIGITS) for evaluated in evaluations]
        if self.pass_at_1 and scores and max(scores) >= self.pass_at_1:
            return f"pass@1 {max(scores):.3f} on held-out problems has reached {self.pass_at_1:g}"
        if self.no_gain and len(scores) > self.no_gain:
            before, last = max(scores[: -self.no_gain]), max(scores[-self.no_gain :])
            if last <= before:
                return f"{self.no_gain} evaluations were not above pass@1 {before:.3f}"
        return None


@dataclass(frozen=True, slots=True)
class StageHistory:
    """The state of a stage. `evaluations` are in order of their versions."""

    begun: bool = False
    finished: bool = False
    evaluations: tuple[Evaluated, ...] = ()


@dataclass(frozen=True, slots=True)
class NextStage:
    """The stage to run now. `index` counts from 0; `begun`: an earlier process began it, so it continues.

    `policy_version` is the version of the stage before that it begins with; None for the first stage.
    """

    index: int
    begun: bool
    policy_version: int | None


def best_of(evaluations: Sequence[Evaluated]) -> Evaluated:
    """The evaluation with the highest pass@1; the earliest version of equal ones. Raises ValueError without any."""
    if not evaluations:
        raise ValueError("the stage has no evaluation, so none of its policies is the best")
    return min(evaluations, key=lambda one: (-round(one.pass_at_1, SCORE_DIGITS), one.policy_version))


def next_stage(starts: Sequence[StartFrom], histories: Sequence[StageHistory]) -> NextStage | None:
    """The first stage that is not finished; None when all are. There is one start and one history for each stage.

    Raises ValueError when a stage was begun before the one before it was finished, or when that has no evaluation.
    """
    unfinished = [index for index, history in enumerate(histories) if not history.finished]
    if not unfinished:
        return None
    index = unfinished[0]
    if any(history.begun for history in histories[index + 1 :]):
        raise ValueError(f"a stage after stage {index + 1} was begun, but stage {index + 1} is not finished")
    version = _chosen(starts[index], histories[index - 1].evaluations) if index else None
    return NextStage(index, histories[index].begun, version)


def _chosen(start: StartFrom, evaluations: Sequence[Evaluated]) -> int:
    best = best_of(evaluations)
    if start is StartFrom.BEST:
        return best.policy_version
    return max(evaluated.policy_version for evaluated in evaluations)
