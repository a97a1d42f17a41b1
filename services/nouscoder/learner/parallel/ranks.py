"""The processes that train one policy together: data parallel, with the weights sharded by FSDP2.

Zhao et al., "PyTorch FSDP", arXiv 2304.11277.

INVARIANT: all ranks make the same calls of a Ranks in the same order. A call that another rank does not answer ends
with RankLost within `patience_s`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, zeros
from transformers import PreTrainedModel

from nouscoder.errors import NousCoderError, Unusable
from nouscoder.learner.parallel.context_parallel import DistributedRow
from nouscoder.learner.parallel.process_rank import ProcessRank, process_rank
from nouscoder.learner.parallel.rendezvous import NobodyCame, meet

Item = TypeVar("Item")


class RankLost(NousCoderError):
    """Another rank died or does not answer. The group must be started again."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process among `size`. `figures` is a group for numbers, `files` one for checkpoints; None in one process.

    `row`: the ranks that hold each packed row together with this one; None where each rank has rows of its own.
    """

    rank: int = 0
    size: int = 1
    store: Store | None = None
    figures: dist.ProcessGroup | None = None
    files: dist.ProcessGroup | None = None
    patience_s: float = 0.0
    row: DistributedRow | None = None

    @classmethod
    def join(cls, device: str, patience_s: float, context_parallel: int = 1) -> Ranks:
        """Join the group that the environment variables name; without them, one process alone.

        `context_parallel` ranks share each row. Raises Unusable for an incomplete environment or a number of ranks that
        is no multiple of it, and RankLost when the others do not come within `patience_s`.
        """
        process = process_rank(os.environ)
        size = 1 if process is None else process.size
        if size % context_parallel:
            raise Unusable(f"learner.context_parallel is {context_parallel}, and {size} ranks are no multiple of it")
        if process is None:
            return cls()
        limit = timedelta(seconds=patience_s)
        with naming_lost_ranks(patience_s):
            store = meet(_store_at(process, limit), process.rank, process.size, patience_s)
            if torch.device(device).type == "cuda":
                torch.cuda.set_device(process.local_rank)
            backend = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
            group = PrefixStore("group", store)
            dist.init_process_group(backend, store=group, rank=process.rank, world_size=process.size, timeout=limit)
            figures, files = (dist.new_group(backend="gloo", timeout=limit) for _ in range(2))
            row = _row_of(process, context_parallel, limit) if context_parallel > 1 else None
        return cls(process.rank, process.size, PrefixStore("learner", store), figures, files, patience_s, row)

    @property
    def is_group(self) -> bool:
        """Whether this process is a rank of a group, of one rank too. Then FSDP2 wraps the model."""
        return self.store is not None

    @property
    def num_rows(self) -> int:
        """Rows that all ranks together work on at a time."""
        return self.size if self.row is None else self.size // self.row.size

    @property
    def row_number(self) -> int:
        """Which of them is this rank's."""
        return self.rank if self.row is None else self.rank // self.row.size

    @property
    def counts_row(self) -> bool:
        """Whether the figures of the row are counted here: by one of its ranks."""
        return self.row is None or self.row.rank == 0

    def leave(self) -> None:
        """Leave the group."""
        if self.is_group:
            dist.destroy_process_group()

    def shard(self, root: nn.Module, model: PreTrainedModel, dtype: torch.dtype, *, on_cpu: bool) -> None:
        """Shard the weights of `root`, through which all forward passes go, and of the layers of its `model`.

        The passes are computed in `dtype`. Gradients are summed over ranks, in float32, because each loss has its share
        of the whole minibatch already. With `on_cpu` the CPU's memory holds weights and gradients.
        """
        if not self.is_group:
            return
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        offload = CPUOffloadPolicy() if on_cpu and model.device.type == "cuda" else OffloadPolicy()
        for module in [*getattr(model.base_model, "layers", ()), root]:
            sharded = fully_shard(module, mp_policy=precision, offload_policy=offload)
            assert isinstance(sharded, FSDPModule)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over ranks of each value."""
        if self.size == 1:
            return [*values]
        return [sum(of_ranks) for of_ranks in zip(*self.gather(tuple(values)), strict=True)]

    def gather(self, item: Item) -> list[Item]:
        """The item of each rank, in the order of ranks."""
        if self.size == 1:
            return [item]
        items: list[Item | None] = [None] * self.size
        dist.all_gather_object(items, item, group=self.figures)
        return [found for found in items if found is not None]


def _row_of(process: ProcessRank, context_parallel: int, limit: timedelta) -> DistributedRow:
    """The row of this rank: consecutive ranks share one. Every rank makes the groups of all rows, in order."""
    starts = range(0, process.size, context_parallel)
    groups = [dist.new_group([*range(start, start + context_parallel)], timeout=limit) for start in starts]
    row, rank = divmod(process.rank, context_parallel)
    group = groups[row]
    assert isinstance(group, dist.ProcessGroup)
    return DistributedRow(group, rank, context_parallel)


def _store_at(process: ProcessRank, limit: timedelta) -> Store:
    """The store of the group: of torchrun's agent, or of rank 0, which opens it at its address."""
    url = f"tcp://{process.address}:{process.port}?rank={process.rank}&world_size={process.size}"
    store: Store = next(iter(rendezvous(url, timeout=limit)))[0]
    store.set_timeout(limit)
    return store


def whole(tensor: Tensor) -> Tensor:
    """The tensor of all ranks; every rank must call this for a sharded one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, in the same memory; all of one that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def zeros_by_rows(weight: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros of this shape, of which each rank has the rows that it has of `weight`, on the device of the weight."""
    if not isinstance(weight, DTensor):
        return torch.zeros(*shape, dtype=dtype, device=weight.device)
    divided = zeros(*shape, dtype=dtype, device_mesh=weight.device_mesh, placements=weight.placements)
    return divided.to(weight.device)


@contextmanager
def naming_lost_ranks(patience_s: float) -> Iterator[None]:
    """Raise RankLost for an error of communication between ranks."""
    try:
        yield
    except NobodyCame as error:
        raise RankLost(str(error)) from error
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
            raise
        raise RankLost(
            f"another rank of the learner died or did not answer within {patience_s:.0f} s"
            f" ({str(error).splitlines()[0][:200]}): see its log, and start the group again"
        ) from error
