"""How the heads of an attention are divided among calls of its kernel, so that all processors of a GPU have work.

The deterministic backward pass of flash-attention 2 (Dao, arXiv 2307.08691; `mha_varlen_bwd`) starts
ceil(processors / (sequences * heads)) blocks for each sequence and head. Each works on its part of the keys, and a
processor works on one block at a time. One sequence of 32 heads on 132 processors is 160 blocks: 132, and then 28 while
the other 104 processors wait. In calls of 12, 12, 4 and 4 heads there are 132 blocks each.
"""

from __future__ import annotations

from functools import cache

# Calls cost something too: the heads are divided only where at most this share of the time is left.
_WORTH_IT = 0.85


@cache
def head_groups(num_sequences: int, num_heads: int, heads_a_key: int, num_processors: int) -> tuple[int, ...]:
    """The number of heads of each call, a multiple of `heads_a_key`, in the least time for sequences of one length."""
    alone = _time(num_sequences, num_heads, num_processors)
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for size in range(heads_a_key, num_heads + 1, heads_a_key):
        firsts = range(heads_a_key, size + 1, heads_a_key)
        rests = ((first, best[(size - first) // heads_a_key]) for first in firsts)
        best.append(
            min(
                (
                    (_time(num_sequences, first, num_processors) + spent, (first, *others))
                    for first, (spent, others) in rests
                ),
                key=lambda plan: (round(plan[0], 9), len(plan[1])),
            )
        )
    spent, groups = best[-1]
    return tuple(sorted(groups, reverse=True)) if spent <= _WORTH_IT * alone else (num_heads,)


def _time(num_sequences: int, num_heads: int, num_processors: int) -> float:
    """Of the backward pass of these heads, in that of one head of one sequence by one processor."""
    rows = num_sequences * num_heads
    parts = -(-num_processors // rows)
    return -(-rows * parts // num_processors) / parts
