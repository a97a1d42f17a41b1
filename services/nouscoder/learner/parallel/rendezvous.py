"""How the ranks of a group find each other when it begins.

They do so in the group's store. torchrun keeps one store while it starts a group again, so the store may hold what an
earlier start left there. Each other rank says hello under a name that it makes up, and rank 0 answers that name with
the name of this start, until all have confirmed it. All that follows is kept under the name of the start.

INVARIANT: the ranks of one start get the same part of the store, and no other start uses that part.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from torch.distributed.distributed_c10d import PrefixStore, Store

from nouscoder.errors import NousCoderError

_LOOK_AGAIN_S = 0.05


class NobodyCame(NousCoderError):
    """A rank did not come to the rendezvous in time. The message names it."""


def meet(store: Store, rank: int, size: int, patience_s: float) -> Store:
    """The part of the store for this start of the group. Each rank must call it once. Raises NobodyCame."""
    until = time.monotonic() + patience_s
    name = _invite(store, range(1, size), until) if rank == 0 else _come(store, rank, until)
    return PrefixStore(f"start/{name}", store)


def _invite(store: Store, others: Sequence[int], until: float) -> str:
    start = uuid.uuid4().hex
    missing = set(others)
    while missing:
        for rank in sorted(missing):
            # What an earlier process of this rank said is answered too. Nobody reads that answer.
            if store.check([f"hello/{rank}"]):
                store.set(f"welcome/{store.get(f'hello/{rank}').decode()}", start)
            if store.check([f"here/{start}/{rank}"]):
                missing.remove(rank)
        _wait_a_little(until, f"rank {min(missing, default=0)} of the learner")
    return start


def _come(store: Store, rank: int, until: float) -> str:
    me = uuid.uuid4().hex
    store.set(f"hello/{rank}", me)
    while not store.check([f"welcome/{me}"]):
        _wait_a_little(until, "rank 0 of the learner")
    start = store.get(f"welcome/{me}").decode()
    store.set(f"here/{start}/{rank}", "1")
    return start


def _wait_a_little(until: float, awaited: str) -> None:
    if time.monotonic() > until:
        raise NobodyCame(f"{awaited} did not come in time: see its log, and start the group again")
    time.sleep(_LOOK_AGAIN_S)
