"""Which groups may be admitted: the one rule of backpressure, enforced in lua/lease.lua and lua/lease_batch.lua.

With k = pipeline_k, n = B / G groups a batch, m batches made so far and v the newest published policy version, a group
is admitted only while afterwards

    groups in flight and not in a batch  <=  (k - (m - v)) * n.

m - v counts the batches that are made and have no published version yet, so rollouts in training count too. Check and
admission are one script. docs/architecture.md ("The bound of staleness") proves from it that no token is more than
k - 1 versions old when it is trained on, and that a run cannot deadlock. Groups are counted, not rollouts: a group that
lost members to dead letters still fills its place in a batch.
"""

from __future__ import annotations

from nouscoder.broker.rules import Rules


def groups_wanted(rules: Rules, max_tasks: int) -> int:
    """Groups that cover `max_tasks` tasks: the most that one lease call admits."""
    return -(-max_tasks // rules.group_size)
