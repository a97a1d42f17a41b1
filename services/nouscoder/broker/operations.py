"""What operators do to a run: they set its mode, list and remove dead letters, and drop a batch.

INVARIANT: each operation is one script, so the ledger balances before and after it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from nouscoder.broker import streams
from nouscoder.broker.errors import InvalidRequest, Refused
from nouscoder.broker.store import Store
from nouscoder.broker.wakeups import Waits
from nouscoder.domain.dead_letter import DeadLetter, GivenUpFor
from nouscoder.domain.run_status import RunMode
from nouscoder.rpc.pairs import HEADER, VERDICT

log = logging.getLogger(__name__)

_MAX_REASON_CHARS = 1000
_MAX_LETTERS = 10_000
_NOT_DROPPED = {
    "unknown": "batch {0} is not the uncommitted batch: `nouscoder status` shows which one is",
    "committing": "batch {0} is being committed",
    "published": "the policy that batch {0} made is published already: start the learner, it commits the batch",
    "training": "a learner is training on batch {0}: stop it first, or wait until the batch is held back",
}


class Operations:
    """The calls of operators on the run in `store`."""

    def __init__(self, store: Store, waits: Waits) -> None:
        self._store = store
        self._waits = waits

    async def set_mode(self, mode: RunMode) -> RunMode:
        """Run, drain or pause from now on; returns the mode before."""
        former, work = await self._store.run("set_mode", mode.value)
        self._waits.wake(streams.work_of(work))
        if former.decode() != mode:
            log.info("the run has another mode", extra={"former": former.decode(), "mode": mode.value})
        return RunMode(former.decode())

    async def report_batch_failure(self, batch_id: int, reason: str) -> bool:
        """A learner could not train on the uncommitted batch. True: the batch is held back until it is dropped."""
        known, held_back = await self._store.run("fail_batch", batch_id, reason[:_MAX_REASON_CHARS])
        if known:
            log.error(
                "a batch cannot be trained on",
                extra={"batch_id": batch_id, "reason": reason, "held_back": bool(held_back)},
            )
        return bool(held_back)

    async def drop_batch(self, batch_id: int) -> int:
        """Abandon the rollouts of the uncommitted batch; returns how many. Raises Refused."""
        outcome, num_rollouts = await self._store.run("drop_batch", batch_id)
        if outcome != b"dropped":
            raise Refused(_NOT_DROPPED[outcome.decode()].format(batch_id))
        log.warning("batch dropped", extra={"batch_id": batch_id, "rollouts": num_rollouts})
        self._waits.wake(await streams.read_available(self._store))
        return int(num_rollouts)

    async def dead_letters(self, max_letters: int = 0) -> list[DeadLetter]:
        """At most `max_letters` rollouts that were given up, newest first; 0: all that are kept."""
        now_ms, rows = await self._store.run("letters", max_letters or _MAX_LETTERS)
        return [_letter(letter_id.decode(), fields, now_ms) for letter_id, fields in rows]

    async def remove_dead_letters(self, letter_ids: Sequence[str], *, requeue: bool) -> tuple[int, list[str]]:
        """Remove letters; returns how many there were, and the problems that are asked again. Raises InvalidRequest."""
        for letter_id in letter_ids:
            if not letter_id.replace("-", "", 1).isdigit():
                raise InvalidRequest(f"{letter_id[:100]!r} is not the name of a dead letter")
        removed, problems, work = await self._store.run("remove_letters", int(requeue), *letter_ids)
        self._waits.wake(streams.work_of(work))
        return int(removed), [problem.decode() for problem in problems]


def _letter(letter_id: str, flat: Sequence[bytes], now_ms: int) -> DeadLetter:
    fields: dict[str, Any] = {key.decode(): value for key, value in zip(flat[::2], flat[1::2], strict=True)}
    return DeadLetter(
        letter_id=letter_id,
        stream=fields["stream"].decode(),
        rollout_id=fields["rollout"].decode(),
        problem_id=fields["problem"].decode(),
        group_id=fields["group"].decode(),
        reason=GivenUpFor(fields["reason"].decode()),
        detail=VERDICT.decode(fields["failure"]).detail if fields["failure"] else "",
        worker_id=fields["worker"].decode(),
        deliveries=int(fields["delivery"]),
        regrades=int(fields["regrades"] or 0),
        age_s=max(0.0, (now_ms - int(letter_id.partition("-")[0])) / 1000),
        header=HEADER.decode(fields["header"]) if fields["header"] else None,
        record=fields["record"].decode(),
    )
