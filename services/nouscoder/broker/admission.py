"""PipelineRL-k admission: the one rule of backpressure (PipelineRL, arXiv 2509.19128; AReaL's eta is k - 1).

Rollouts live and not yet in a batch (QUEUED to READY) never exceed k * B. A slot frees when a group is filtered,
stale or abandoned, and when a batch is made of ready groups. Groups are admitted whole, on demand, inside the script
that leases tasks (lua/lease.lua), so the check and the admission are one atom. A group is admitted only where all of
it fits; since a batch is made of B / G groups, whatever their size, this never deadlocks for any k >= 1.
"""

from __future__ import annotations

from collections.abc import Mapping

from nouscoder.broker.rules import Rules
from nouscoder.domain.ledger import IN_FLIGHT, RolloutState

UNBATCHED = tuple(state for state in IN_FLIGHT if state is not RolloutState.TRAINING)


def slots_free(rules: Rules, in_flight: Mapping[str, int]) -> int:
    """Rollouts that may be admitted now, given the live rollouts by state."""
    return rules.bound - sum(in_flight.get(state, 0) for state in UNBATCHED)


def groups_wanted(rules: Rules, max_tasks: int) -> int:
    """Groups that cover `max_tasks` tasks: the most that one lease call admits."""
    return -(-max_tasks // rules.group_size)
