"""Messages of rank 0 to the other ranks. Rank 0 owns the protocol; the others do what it tells them.

Messages are numbered entries in the store of the group. Each rank also counts in the store while it lives, so a rank
that waits knows whether the others live.

INVARIANT: each rank gets each message once, in order. A rank that waits ends with RankLost when a rank that it waits
for has not counted for `patience_s`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum

from torch.distributed.distributed_c10d import Store

from nouscoder.learner.parallel.ranks import RankLost, Ranks, naming_lost_ranks

_NUM_LEFT = "left"
_COUNT_EVERY_S = 1.0
_LOOK_AGAIN_S = 0.02
_STOP_LIMIT_S = 60.0


class RankMessageKind(StrEnum):
    """What a message tells a rank to do.

    LOAD the checkpoint of step `number`, 0 for the initial policy. TRAIN on the saved batch `number`. GATHER the
    weights on rank 0. PUBLISH its part of the policy version `number` into `folder`. SAVE its part of a checkpoint into
    `folder`. STOP.
    """

    LOAD = "load"
    TRAIN = "train"
    GATHER = "gather"
    PUBLISH = "publish"
    SAVE = "save"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class RankMessage:
    """One message. See RankMessageKind for `number` and `folder`."""

    work: RankMessageKind
    number: int = 0
    folder: str = ""


class Pulse:
    """Counts in the store while this rank lives, and watches the counts of other ranks."""

    def __init__(self, ranks: Ranks, watched: Sequence[int]) -> None:
        self._ranks = ranks
        self._counts = dict.fromkeys(watched, -1)
        self._counted_at = dict.fromkeys(watched, time.monotonic())
        self._fault = ""
        self._closed = threading.Event()
        if ranks.store is not None:
            threading.Thread(target=self._run, args=(ranks.store,), name="pulse", daemon=True).start()

    def check(self) -> None:
        """Raises RankLost when a watched rank has not counted for `patience_s`."""
        if self._fault:
            raise RankLost(self._fault)

    def close(self) -> None:
        """Stop counting."""
        self._closed.set()

    def _run(self, store: Store) -> None:
        try:
            while not self._fault and not self._closed.wait(_COUNT_EVERY_S):
                store.add(_count_of(self._ranks.rank), 1)
                for rank in self._counts:
                    count, now = store.add(_count_of(rank), 0), time.monotonic()
                    if count != self._counts[rank]:
                        self._counts[rank], self._counted_at[rank] = count, now
                    elif now - self._counted_at[rank] > self._ranks.patience_s:
                        self._fault = (
                            f"rank {rank} of the learner has not answered for {self._ranks.patience_s:.0f} s:"
                            " see its log, and start the group again"
                        )
        except RuntimeError as error:
            self._fault = f"rank 0 of the learner is gone, and its store with it ({str(error).splitlines()[0][:200]})"


class Leader:
    """Rank 0's side. In a group of one it does nothing."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._next = 0
        self._is_lost = False
        self._pulse = Pulse(ranks, range(1, ranks.size))

    def tell(self, message: RankMessage) -> None:
        """Give all other ranks the message. Raises RankLost."""
        if self._ranks.store is None:
            return
        self._pulse.check()
        with naming_lost_ranks(self._ranks.patience_s):
            self._ranks.store.set(_key(self._next), json.dumps(asdict(message)))
        self._next += 1

    @contextmanager
    def together(self, message: RankMessage) -> Iterator[None]:
        """Give all other ranks the message; the block is this rank's part of it. Raises RankLost."""
        try:
            self.tell(message)
            with naming_lost_ranks(self._ranks.patience_s):
                yield
        except RankLost:
            self._is_lost = True
            raise

    def check(self) -> None:
        """Raises RankLost when another rank has not answered for `patience_s`. For use while rank 0 waits."""
        self._pulse.check()

    def close(self) -> None:
        """Tell the others to stop, and wait until they have left, because they need the store of this process.

        It waits at most 60 s, and not at all after a rank was lost.
        """
        store = self._ranks.store
        if store is not None and not self._is_lost:
            with suppress(RankLost), naming_lost_ranks(self._ranks.patience_s):
                self.tell(RankMessage(RankMessageKind.STOP))
                until = time.monotonic() + _STOP_LIMIT_S
                while store.add(_NUM_LEFT, 0) < self._ranks.size - 1 and time.monotonic() < until:
                    self._pulse.check()
                    time.sleep(_LOOK_AGAIN_S)
        self._is_lost = True  # a second call has nothing to do
        self._pulse.close()


class Listener:
    """The side of another rank."""

    def __init__(self, ranks: Ranks, store: Store) -> None:
        self._ranks = ranks
        self._store = store
        self._next = 0
        self._pulse = Pulse(ranks, [0])

    def next(self) -> RankMessage:
        """Wait for the next message. Raises RankLost."""
        with naming_lost_ranks(self._ranks.patience_s):
            while not self._store.check([_key(self._next)]):
                self._pulse.check()
                time.sleep(_LOOK_AGAIN_S)
            message = json.loads(self._store.get(_key(self._next)))
        self._next += 1
        return RankMessage(**{**message, "work": RankMessageKind(message["work"])})

    def leave(self) -> None:
        """Let rank 0 know that this rank needs it no longer. Call it once."""
        self._pulse.close()
        with suppress(RuntimeError):  # the store is gone, and rank 0 with it
            self._store.add(_NUM_LEFT, 1)


def _key(number: int) -> str:
    return f"command/{number}"


def _count_of(rank: int) -> str:
    return f"alive/{rank}"
