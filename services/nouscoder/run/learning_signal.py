"""Whether the groups of a run have something to learn, and what is to be warned of.

INVARIANT: while rollouts are filtered and no group is kept, a warning is due within WARN_AFTER_S of
the first filtered group, and after `run.max_filtered_batches` batches of filtered rollouts `judge` raises
NothingToLearn.

INVARIANT: a policy that solved problems and, after it was trained, solves none is told so, and is not told to take
other problems.

INVARIANT: a run of whose problems generation can make no rollout ends, with the reason: `judge` raises NothingToLearn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from nouscoder.config import Config
from nouscoder.domain.run_status import RolloutState, RunStatus
from nouscoder.errors import Unusable

WARN_AFTER_S = 30.0
_ADVICE = "take other problems or another policy, or set broker.drop_zero_variance = false"
_DIVERGED_ADVICE = (
    "other problems will not help: begin again from an earlier version (nouscoder export RUN --version N) with a lower"
    " learner.learning_rate"
)
_EXPECTED = 7.0  # accepted rollouts, at the rate of before. The chance of none instead is exp(-7), one in a thousand.


class NothingToLearn(Unusable):
    """All groups of a long time were filtered, or generation refuses all problems. The message says which."""


class SamplerMismatch(Unusable):
    """Sampler and learner compute different log-probabilities. The message says how much, and what may cause it."""


@dataclass(frozen=True, slots=True)
class _Since:
    """The counts when a group was last kept. `filtered_s` is when the first group was filtered after that."""

    kept: int
    filtered: int
    graded: int
    accepted: int
    filtered_s: float | None = None


def all_retired(status: RunStatus) -> str:
    """That the run is over because all problems are retired for good, which is no failure; "" if it is not so."""
    if status.finished or not status.all_retired:
        return ""
    return (
        f"the run ends after {status.batches_committed} batches: no problem is left to ask, because all are retired"
        " (broker.curriculum.retire_after) for good (recheck_epochs = 0)"
    )


class LearningSignal:
    """Watches the counts of one run."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._batch_size = config.broker.batch_size
        self._max_filtered = config.run.max_filtered_batches * config.broker.batch_size
        self._clock = clock
        self._since: _Since | None = None
        self._warn_at = self._batch_size
        self._refused = 0

    def judge(self, status: RunStatus) -> str | None:
        """A warning if one is due: after WARN_AFTER_S or a batch, then at each doubled count. Raises NothingToLearn."""
        if status.all_refused:
            raise NothingToLearn(
                f"the run ended: generation can make no rollout of any of the {status.num_problems} problems, such as:"
                f" {status.refused_reason}"
            )
        if status.refused_problems > 2 * self._refused:
            self._refused = status.refused_problems
            return (
                f"warning: refused: generation can make no rollout of {status.refused_problems} of"
                f" {status.num_problems} problems, which are not asked again, such as: {status.refused_reason}"
            )
        in_flight = status.ledger.in_flight
        kept = status.ledger.trained + in_flight.get(RolloutState.READY, 0) + in_flight.get(RolloutState.TRAINING, 0)
        now = _Since(kept, status.ledger.filtered, status.rollouts_graded, status.rollouts_accepted)
        since = self._since
        if since is None or now.kept != since.kept:
            self._since, self._warn_at = now, 0
            return None
        filtered = now.filtered - since.filtered
        if not filtered:
            return None
        begun_s = self._clock() if since.filtered_s is None else since.filtered_s
        self._since = _Since(since.kept, since.filtered, since.graded, since.accepted, begun_s)
        sentence = _sentence(since, now, filtered)
        if self._max_filtered and filtered >= self._max_filtered:
            raise NothingToLearn(f"the run ended: {sentence} (run.max_filtered_batches is the bound)")
        due = filtered >= self._batch_size or self._clock() - begun_s >= WARN_AFTER_S
        if not due or filtered < self._warn_at:
            return None
        self._warn_at = 2 * filtered
        return f"warning: all_filtered: {sentence}"


def _sentence(since: _Since, now: _Since, filtered: int) -> str:
    accepted, graded = now.accepted - since.accepted, now.graded - since.graded
    rate = since.accepted / since.graded if since.graded else 0.0
    if not accepted and since.kept and rate * graded >= _EXPECTED:
        return (
            f"0 of {graded} accepted, and {rate:.0%} before: the training has broken the policy (its weights have"
            f" diverged), so all {filtered} rollouts were filtered; {_DIVERGED_ADVICE}"
        )
    if not accepted:
        why = "the policy solves none of these problems"
    elif accepted == graded:
        why = "the policy always solves these problems"
    else:
        why = "each problem is solved always or never"
    return f"{accepted} of {graded} accepted: {why}, so all {filtered} rollouts were filtered; {_ADVICE}"
