"""What operators do and see: the run's mode, dead letters, a batch to drop; the ledger, the status, and why it stalls.

INVARIANT: each operation is one script, so the ledger balances before and after it.

The ledger and the status are read in one script, so all numbers are of one instant. INVARIANT: admitted = trained +
filtered + stale + abandoned + lost + in flight after every transition. Admitted and the final states are counters. The
rollouts in flight are counted from the sets of their states, so a rollout that vanished or was doubled makes `balanced`
false.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

from nouscoder.broker import streams
from nouscoder.broker.errors import InvalidRequest, Refused
from nouscoder.broker.store import RunRules, Store
from nouscoder.broker.streams import Stream
from nouscoder.broker.wakeups import Waits
from nouscoder.domain.run_status import IN_FLIGHT, DeadLetter, GivenUpFor, Ledger, RunMode, RunStatus, StreamStatus
from nouscoder.domain.stall import HeldBatch, Holder, StallCause, StallSnapshot, Totals
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


_CANCELLED = "cancelled:"


async def read_status(store: Store, rules: RunRules, run: str) -> RunStatus:
    """The run at one instant."""
    flat, sizes, streams, groups_free, missing, num_refused, refused_reason = await store.run("status")
    meta = {key.decode(): value for key, value in zip(flat[::2], flat[1::2], strict=True)}

    def number(field: str) -> int:
        return int(meta.get(field, 0))

    in_flight = {state.value: int(size) for state, size in zip(IN_FLIGHT, sizes, strict=True)}
    totals = {name: number(name) for name in ("admitted", "trained", "filtered", "stale", "abandoned", "lost")}
    ledger = Ledger(**totals, in_flight=in_flight)
    finished = "finish_reason" in meta
    mode = RunMode(meta["mode"].decode()) if "mode" in meta else RunMode.RUNNING
    is_admitting = not finished and mode is RunMode.RUNNING
    return RunStatus(
        run=run,
        ledger=ledger,
        streams=tuple(
            StreamStatus(stream.value, int(lag), int(held), number(f"redelivered:{stream}"), number(f"dead:{stream}"))
            for stream, (lag, held) in zip(Stream, streams, strict=True)
        ),
        policy_version=number("policy_version") if "policy_version" in meta else None,
        step=number("step"),
        batches_committed=number("batches_committed"),
        # Negative after a restart with a lower pipeline_k: more groups are in flight than it admits.
        admission_slots_free=max(0, int(groups_free)) * rules.group_size if is_admitting else 0,
        finished=finished,
        rollouts_accepted=number("accepted"),
        rollouts_graded=number("graded"),
        missing_problems={
            problem.decode(): int(rollouts) for problem, rollouts in zip(missing[::2], missing[1::2], strict=True)
        },
        run_id=meta["run_id"].decode() if "run_id" in meta else "",
        mode=mode,
        refused_problems=int(num_refused),
        refused_reason=refused_reason.decode(),
        finish_reason=meta.get("finish_reason", b"").decode(),
        cancelled={
            field.removeprefix(_CANCELLED): int(rollouts)
            for field, rollouts in sorted(meta.items())
            if field.startswith(_CANCELLED)
        },
    )


_ENTRIES_LOOKED_AT = 1000


async def read_snapshot(
    store: Store, status: RunStatus, rules: RunRules, num_problems: int, agent_session_s: float
) -> StallSnapshot:
    """Which worker holds what, and what happened since the last committed batch."""
    now_ms, rows, batch, ready, meta_fields, commits, paused, faults = await store.run("holders", _ENTRIES_LOOKED_AT)
    meta = _texts(meta_fields)
    commit_ms = [int(entry.partition(b"-")[0]) for entry, _ in commits]
    last_totals = _texts(commits[0][1]) if commits else {}
    began_ms = commit_ms[0] if commits else int(meta.get("began", now_ms))
    gaps_s = [(newer - older) / 1000 for newer, older in pairwise(commit_ms)]
    names = [field.name for field in fields(Totals)]
    return StallSnapshot(
        status=status,
        since_commit_s=max(0.0, (now_ms - began_ms) / 1000),
        usual_batch_s=statistics.median(gaps_s) if gaps_s else 0.0,
        since=Totals(**{name: int(meta.get(name, 0)) - int(last_totals.get(name, 0)) for name in names}),
        sampling=_holders(rows, Stream.TASKS, now_ms, paused),
        grading=_holders(rows, Stream.GRADING, now_ms, paused),
        batch=_held_batch(_texts(batch), now_ms),
        ready_groups=int(ready),
        asked_s={
            stream.value: max(0.0, (now_ms - int(meta[f"asked:{stream}"])) / 1000)
            for stream in Stream
            if f"asked:{stream}" in meta
        },
        num_problems=num_problems,
        lease_s=rules.lease_ms / 1000,
        batch_lease_s=rules.batch_lease_ms / 1000,
        batch_groups=rules.batch_groups,
        group_size=rules.group_size,
        redis_faults=tuple(StallCause(fault.decode()) for fault in faults),
        agent_session_s=agent_session_s,
    )


def _texts(flat: Sequence[bytes]) -> dict[str, str]:
    """The fields of a hash or an entry. Those that are not text are decoded with replacement characters: unused."""
    return {key.decode(): value.decode(errors="replace") for key, value in zip(flat[::2], flat[1::2], strict=True)}


def _holders(rows: Sequence[Any], stream: Stream, now_ms: int, paused: Sequence[bytes]) -> tuple[Holder, ...]:
    return tuple(
        Holder(
            rollout.decode(),
            worker.decode(),
            held_s=(now_ms - since) / 1000,
            silent_s=silent_ms / 1000,
            still_s=still_ms / 1000,
            delivery=int(delivery),
            paused=worker in paused,
        )
        for of, rollout, worker, silent_ms, since, still_ms, delivery in rows
        if of.decode() == stream
    )


def _held_batch(batch: Mapping[str, str], now_ms: int) -> HeldBatch | None:
    if not batch:
        return None
    return HeldBatch(
        batch_id=int(batch["id"]),
        worker_id=batch["worker"],
        held_s=(now_ms - int(batch["since"])) / 1000,
        silent_s=(now_ms - int(batch["beat"])) / 1000,
        delivery=int(batch["delivery"]),
        failures=int(batch.get("failures", 0)),
        failure=batch.get("failure", ""),
        held_back="held_back" in batch,
    )
