"""Commands of rank 0 to the other ranks. Rank 0 owns the protocol; the others do what it tells them.

Commands are numbered entries in the store of the group. Rank 0 also counts in the store while it lives, so a rank that
waits knows whether rank 0 does.

INVARIANT: each rank gets each command once, in order. A rank that waits ends with RankLost when rank 0 has not counted
for `patience_s`.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum

from torch.distributed.distributed_c10d import Store

from nouscoder.learner.ranks import RankLost, Ranks, naming_lost_ranks

_ALIVE = "alive"
_COUNT_EVERY_S = 1.0
_LOOK_AGAIN_S = 0.02


class Work(StrEnum):
    """What a rank is told to do.

    LOAD the checkpoint of step `number`, 0 for the initial policy. TRAIN on the saved batch `number`. GATHER the
    weights on rank 0. SAVE its part of a checkpoint into `folder`. STOP.
    """

    LOAD = "load"
    TRAIN = "train"
    GATHER = "gather"
    SAVE = "save"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Command:
    """One command. See Work for `number` and `folder`."""

    work: Work
    number: int = 0
    folder: str = ""


class Leader:
    """Rank 0's side. It does nothing in a group of one."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._next = 0
        self._closed = threading.Event()
        if ranks.size > 1:
            threading.Thread(target=self._count, name="alive", daemon=True).start()

    def tell(self, command: Command) -> None:
        """Give all other ranks the command. Raises RankLost when the store is gone."""
        if self._ranks.store is None or self._closed.is_set():
            return
        with naming_lost_ranks(self._ranks.patience_s):
            self._ranks.store.set(_key(self._next), json.dumps(asdict(command)))
        self._next += 1

    def close(self) -> None:
        """Tell the others to stop. Safe to call twice."""
        with suppress(RankLost):  # then the store is gone, and whoever waits for it has noticed
            self.tell(Command(Work.STOP))
        self._closed.set()

    def _count(self) -> None:
        assert self._ranks.store is not None
        try:
            while not self._closed.wait(_COUNT_EVERY_S):
                self._ranks.store.add(_ALIVE, 1)
        except RuntimeError:
            return  # the next command reports that the store is gone


class Listener:
    """The side of another rank."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._next = 0

    def next(self) -> Command:
        """Wait for the next command. Raises RankLost."""
        assert self._ranks.store is not None
        store, known, since = self._ranks.store, -1, time.monotonic()
        with naming_lost_ranks(self._ranks.patience_s):
            while not _has(store, _key(self._next)):
                count = store.add(_ALIVE, 0)
                if count != known:
                    known, since = count, time.monotonic()
                elif time.monotonic() - since > self._ranks.patience_s:
                    raise RankLost(f"rank 0 of the learner has not lived for {self._ranks.patience_s:.0f} s")
            command = json.loads(store.get(_key(self._next)))
        self._next += 1
        return Command(**{**command, "work": Work(command["work"])})


def _has(store: Store, key: str) -> bool:
    """Whether the key is there. Waits a moment when it is not."""
    if store.check([key]):
        return True
    time.sleep(_LOOK_AGAIN_S)
    return False


def _key(number: int) -> str:
    return f"command/{number}"
