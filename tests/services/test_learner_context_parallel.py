"""The parts of a row that several ranks hold have, together, the scores and gradients of the whole row.

Here each rank is a thread, and gathering is a concatenation through which autograd goes. test_learner_ranks.py has the
same with processes.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.reference_varlen import varlen_attn_on_cpu
from torch import Tensor

from nouscoder.errors import Unusable
from nouscoder.learner.model.kernels import SDPA_VARLEN, TORCH_VARLEN
from nouscoder.learner.model.logprobs import Scorer
from nouscoder.learner.model.packed_attention import RowLayout
from nouscoder.learner.model.packing import MicroBatch, pack
from nouscoder.learner.model.synthetic import random_batch, random_policy
from nouscoder.learner.parallel.context_parallel import DistributedRow, part_of
from nouscoder.learner.parallel.ranks import Ranks

CPU = torch.device("cpu")
LIMIT_S = 120.0


NO_GROUP: Any = None


class Lonely(DistributedRow):
    """A rank that gathers nothing."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(NO_GROUP, rank, size)

    def gather_keys(self, mine: Tensor) -> Tensor:
        raise AssertionError

    def gather_scores(self, mine: Tensor, owners: Tensor) -> Tensor:
        raise AssertionError


class Threads:
    """Ranks of one row, each a thread of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: list[Any] = [None] * size
        self.barrier = Barrier(size)

    def all_of(self, rank: int, mine: Tensor) -> list[Tensor]:
        self.parts[rank] = mine
        self.barrier.wait(LIMIT_S)
        parts = list(self.parts)
        self.barrier.wait(LIMIT_S)
        return parts


@dataclass(frozen=True)
class ThreadRow(DistributedRow):
    threads: Threads

    def gather_keys(self, mine: Tensor) -> Tensor:
        return torch.cat(self.threads.all_of(self.rank, mine))

    def gather_scores(self, mine: Tensor, owners: Tensor) -> Tensor:
        whole = torch.zeros(len(mine), len(owners))
        for rank, part in enumerate(self.threads.all_of(self.rank, mine)):
            whole = whole.index_copy(1, (owners == rank).nonzero()[:, 0], part)
        return whole


def row_of(num_rollouts: int, seed: int = 3) -> MicroBatch:
    rollouts = [graded.rollout for graded in random_batch(0, seed=seed, prompt_tokens=5, max_tokens=40).rollouts]
    (row,) = pack(rollouts[:num_rollouts], 10_000, CPU)
    return row


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_rollouts", [1, 3, 16])
def test_each_loss_token_is_predicted_once_by_the_token_before_it(size: int, num_rollouts: int) -> None:
    whole = row_of(num_rollouts)
    parts = [part_of(whole, Lonely(rank, size)) for rank in range(size)]
    rows = [part.micro_batch for part in parts]
    assert len({row.input_ids.shape for row in rows}) == 1, "all ranks hold as many tokens"
    assert sum(row.num_tokens for row in rows) == whole.num_tokens
    for rank, row in enumerate(rows):
        mine = parts[rank].owners == rank
        before = whole.positions[mine]
        assert torch.equal(row.targets, whole.targets[mine])
        assert torch.equal(row.input_ids[0, row.positions], whole.input_ids[0, before])
        assert torch.equal(row.position_ids[0, row.positions], whole.position_ids[0, before])
        inside = before + 1 < whole.input_ids.shape[1]
        same_rollout = whole.position_ids[0, (before + 1).clamp(max=whole.input_ids.shape[1] - 1)] > 0
        both = inside & same_rollout
        assert torch.equal(row.targets[both], whole.input_ids[0, before[both] + 1]), (
            "the next token, also over a border"
        )


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 4))
@settings(max_examples=30)
def test_each_query_has_the_keys_of_its_sequence_up_to_itself(lengths: list[int], size: int) -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    count = sum(lengths)
    numbers = torch.arange(count)[None]  # the number of each token in the row
    whole = MicroBatch((), numbers, numbers, RowLayout.of(lengths, CPU), empty, empty, empty, empty, empty)
    starts = [0, *accumulate(lengths)]
    parts = [part_of(whole, Lonely(rank, size)).micro_batch for rank in range(size)]
    of_all = torch.cat([part.input_ids[0] for part in parts])  # the keys in the order of ranks
    seen: list[int] = []
    for part in parts:
        layout: Any = part.layout
        queries, keys = (pairwise(ends.tolist()) for ends in (layout.segments.cu_queries, layout.segments.cu_keys))
        for (first, last), (first_key, last_key) in zip(queries, keys, strict=True):
            found = part.position_ids[0, first:last].tolist()
            attended = of_all[layout.keys[first_key:last_key]].tolist()
            if attended[-1] != found[-1] or found[0] >= count:
                continue  # padding at the end of the row
            start = max(place for place in starts if place <= found[0])
            assert attended == list(range(start, found[-1] + 1))
            seen += found
    assert sorted(seen) == list(range(count)) or count % (2 * size), "every token once"


def test_ranks_have_about_equal_work() -> None:
    lengths = [4000]
    empty, numbers = torch.zeros(0, dtype=torch.int64), torch.arange(4000)[None]
    whole = MicroBatch((), numbers, numbers, RowLayout.of(lengths, CPU), empty, empty, empty, empty, empty)
    work = []
    for rank in range(4):
        segments = part_of(whole, Lonely(rank, 4)).micro_batch.layout.segments
        queries, keys = (ends.diff().tolist() for ends in (segments.cu_queries, segments.cu_keys))
        work.append(sum(q * k - q * (q - 1) // 2 for q, k in zip(queries, keys, strict=True)))
    assert sum(work) == 4000 * 4001 // 2
    assert max(work) - min(work) < 0.01 * min(work)


def scores_and_gradient(scorer: Scorer, scores: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    weights = torch.randn(2, len(scores[0]), generator=torch.Generator().manual_seed(1))
    scorer.zero_grad()
    torch.autograd.backward((weights[0] * scores[0] + weights[1] * scores[1]).sum())
    gradient = torch.cat([weight.grad.flatten() for weight in scorer.parameters() if weight.grad is not None])
    return scores[0].detach(), scores[1].detach(), gradient


@pytest.mark.parametrize("kernel", [SDPA_VARLEN, TORCH_VARLEN])
@pytest.mark.parametrize(("size", "num_rollouts"), [(2, 1), (2, 6), (3, 6)])
def test_the_parts_have_the_scores_and_gradients_of_the_whole_row(
    kernel: str, size: int, num_rollouts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nouscoder.learner.model.kernels.varlen_attn", varlen_attn_on_cpu)
    model, row = random_policy(0), row_of(num_rollouts)
    alone = Scorer(model)
    expected = scores_and_gradient(alone, alone(row, entropy_gradient=True))
    model.set_attn_implementation(kernel)
    threads = Threads(size)
    members = [ThreadRow(NO_GROUP, rank, size, threads) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        found = [*pool.map(lambda member: Scorer(model, member)(row, entropy_gradient=True), members)]
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True)), "all have all scores"
    for one, two in zip(scores_and_gradient(alone, found[0]), expected, strict=True):
        assert float((one - two).norm() / two.norm()) < 1e-5


def test_a_number_of_ranks_that_is_no_multiple_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(Unusable, match=r"learner\.context_parallel is 2, and 1 ranks are no multiple of it"):
        Ranks.join("cpu", 1.0, context_parallel=2)
