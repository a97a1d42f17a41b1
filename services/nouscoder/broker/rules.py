"""The settings of a run that the scripts enforce: admission, staleness, leases, filters."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Self

from nouscoder.config import BrokerSection
from nouscoder.domain.staleness import StalenessBound

# A consumer that holds nothing and asked for nothing for this time is deleted.
FORGET_CONSUMER_S = 3600.0
# A record that no rollout took this time after it was announced is deleted.
FORGET_RECORD_S = 600.0
# The reason why work was cancelled is kept this time for the heartbeat of its worker.
FORGET_CANCELLED_S = 600.0


@dataclass(frozen=True, slots=True)
class Rules:
    """`batch_groups` (B / G) is the number of groups in a batch; one script ends at most `commit_chunk` rollouts.

    `pipeline_k`, `max_age` and `waits_for_older` follow from `broker.stale_policy` (domain/staleness.py).
    """

    group_size: int
    pipeline_k: int
    batch_groups: int
    max_age: int
    waits_for_older: bool
    max_deliveries: int
    max_regrades: int
    drop_zero_variance: bool
    max_filtered_groups: int
    solved_pass_rate: float
    over_sampling: float
    lease_ms: int
    batch_lease_ms: int
    sampling_progress_ms: int
    grading_progress_ms: int
    max_batch_failures: int
    max_batch_deliveries: int
    dead_letters: int
    announced_ms: int = field(default=int(1000 * FORGET_RECORD_S), init=False)
    commit_chunk: int = field(default=1024, init=False)
    forget_ms: int = field(default=int(1000 * FORGET_CONSUMER_S), init=False)
    cancelled_ms: int = field(default=int(1000 * FORGET_CANCELLED_S), init=False)

    @classmethod
    def of(cls, section: BrokerSection) -> Self:
        """The rules of a configuration."""
        bound = StalenessBound.of(section.stale_policy, section.pipeline_k, section.max_staleness)
        return section.record(
            cls,
            pipeline_k=bound.pipeline_k,
            batch_groups=section.batch_size // section.group_size,
            max_age=bound.max_age,
            waits_for_older=bound.waits_for_older,
            solved_pass_rate=section.curriculum.retire_pass_rate,
            lease_ms=round(1000 * section.lease_s),
            batch_lease_ms=round(1000 * section.batch_lease_s),
            sampling_progress_ms=round(1000 * section.sampling_progress_s),
            grading_progress_ms=round(1000 * section.grading_progress_s),
        )

    def to_json(self) -> str:
        """As the scripts read them."""
        return json.dumps(asdict(self))
