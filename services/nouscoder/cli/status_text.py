"""The output of `nouscoder status` and `nouscoder why-stalled`."""

from __future__ import annotations

import json
from dataclasses import asdict

from nouscoder.config import Config
from nouscoder.domain.run_status import RunStatus
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.tls import channel_credentials
from nouscoder.rpc.worker import observer_id

_PATIENCE_S = 3.0


def broker_of(config: Config) -> BrokerClient:
    """A client of the configured broker, with the configured certificates. Raises CertificatesUnusable."""
    credentials = channel_credentials(config.tls)
    return BrokerClient(config.broker.grpc, observer_id("status"), patience_s=_PATIENCE_S, credentials=credentials)


async def status_text(config: Config, *, as_json: bool) -> str:
    """The state of the run. Raises PeerError when the broker does not answer."""
    async with broker_of(config) as broker:
        status = await broker.status()
    if as_json:
        return json.dumps(asdict(status) | {"balanced": status.ledger.balanced}, indent=1)
    return "\n".join(status_lines(status))


def status_lines(status: RunStatus) -> list[str]:
    """The state of the run for a person."""
    ledger = status.ledger
    return [
        f"run {status.run}: step {status.step}, {status.batches_committed} batches, policy {status.policy_version},"
        f" {'finished' if status.finished else status.mode.value}",
        f"ledger: {ledger.admitted} admitted = {ledger.trained} trained + {ledger.filtered} filtered"
        f" + {ledger.stale} stale + {ledger.abandoned} abandoned + {ledger.lost} lost"
        f" + {sum(ledger.in_flight.values())} in flight"
        f" ({'balanced' if ledger.balanced else 'NOT BALANCED'})",
        *(f"  in flight, {state}: {count}" for state, count in ledger.in_flight.items() if count),
        *(
            f"stream {s.stream}: {s.lag} waiting, {s.pending} leased, {s.redeliveries} redelivered,"
            f" {s.dead_letters} given up"
            for s in status.streams
        ),
        f"graded: {status.rollouts_graded}, accepted: {status.rollouts_accepted}",
        *(f"cancelled: {rollouts} rollouts, {reason}" for reason, rollouts in status.cancelled.items()),
        *([status.back_pressure] if status.back_pressure else []),
        *(
            f"problem {problem} is gone from the problem file: {rollouts} rollouts abandoned"
            for problem, rollouts in status.missing_problems.items()
        ),
    ]


async def why_stalled_text(config: Config, *, as_json: bool) -> str:
    """What holds the next batch up, in one paragraph. Raises PeerError."""
    async with broker_of(config) as broker:
        blockers = await broker.why_stalled()
    if as_json:
        return json.dumps([asdict(blocker) for blocker in blockers], indent=1)
    return " ".join(blocker.reason for blocker in blockers) or "nothing is stalled"
