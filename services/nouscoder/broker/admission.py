"""Which groups may be admitted: one rule, enforced in lua/lease.lua and lua/lease_batch.lua.

With k = pipeline_k, n = B / G groups a batch, m batches made so far and v the newest published policy version, a group
is admitted only while afterwards

    groups in flight and not in a batch  <=  (k - (m - v)) * n.

m - v is the number of batches that are made and have no published version yet, so rollouts in training count too. One
script checks the rule and admits. docs/architecture.md ("The bound of staleness") proves that therefore no token is
more than k - 1 versions old when it is trained on, and that a run cannot deadlock. The rule counts groups, not
rollouts: a group that lost members to dead letters still takes one of the n places of a batch.
"""

from __future__ import annotations

from nouscoder.broker.rules import Rules


def groups_wanted(rules: Rules, max_tasks: int) -> int:
    """The number of groups that have `max_tasks` tasks: one lease call admits no more."""
    return -(-max_tasks // rules.group_size)
