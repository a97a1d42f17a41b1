"""Reads the snapshot that domain/stall.py judges, in one script."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

from nouscoder.broker.rules import Rules
from nouscoder.broker.store import Store
from nouscoder.broker.streams import Stream
from nouscoder.domain.run_status import RunStatus
from nouscoder.domain.stall import HeldBatch, Holder, Snapshot, StallCause, Totals

_ENTRIES_LOOKED_AT = 1000


async def read_snapshot(store: Store, status: RunStatus, rules: Rules, num_problems: int) -> Snapshot:
    """Which worker holds what, and what happened since the last committed batch."""
    now_ms, rows, batch, ready, meta_fields, commits, paused, faults = await store.run("holders", _ENTRIES_LOOKED_AT)
    meta = _texts(meta_fields)
    commit_ms = [int(entry.partition(b"-")[0]) for entry, _ in commits]
    last_totals = _texts(commits[0][1]) if commits else {}
    began_ms = commit_ms[0] if commits else int(meta.get("began", now_ms))
    gaps_s = [(newer - older) / 1000 for newer, older in pairwise(commit_ms)]
    names = [field.name for field in fields(Totals)]
    return Snapshot(
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
