"""The ledger and the state of the run, read in one script, so all numbers are of one instant.

INVARIANT: admitted = trained + filtered + stale + abandoned + lost + in flight after every transition. Admitted and the
final states are counters. The rollouts in flight are counted from the sets of their states, so a rollout that vanished
or was doubled makes `balanced` false.
"""

from __future__ import annotations

from nouscoder.broker.rules import Rules
from nouscoder.broker.store import Store
from nouscoder.broker.streams import Stream
from nouscoder.domain.run_status import IN_FLIGHT, Ledger, RunMode, RunStatus, StreamStatus

_CANCELLED = "cancelled:"


async def read_status(store: Store, rules: Rules, run: str) -> RunStatus:
    """The run at one instant."""
    flat, sizes, streams, groups_free, missing = await store.run("status")
    meta = {key.decode(): value for key, value in zip(flat[::2], flat[1::2], strict=True)}

    def number(field: str) -> int:
        return int(meta.get(field, 0))

    in_flight = {state.value: int(size) for state, size in zip(IN_FLIGHT, sizes, strict=True)}
    ledger = Ledger(
        number("admitted"),
        number("trained"),
        number("filtered"),
        number("stale"),
        number("abandoned"),
        in_flight,
        number("lost"),
    )
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
        cancelled={
            field.removeprefix(_CANCELLED): int(rollouts)
            for field, rollouts in sorted(meta.items())
            if field.startswith(_CANCELLED)
        },
    )
