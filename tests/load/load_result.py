"""The result of an overload, and its checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.load.load_client import Tally
from tests.load.load_watch import Holding

_FAIR, _FAIR_COUNT = 0.10, 3  # share; count for short runs, in which shares are rounded to whole turns
_MORE_MEMORY, _MORE_MEMORY_BYTES = 0.15, 32 << 20  # allowed growth: submissions in progress need memory
_MORE_DESCRIPTORS = 16


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The plan: all clients together send `overload` times the capacity, the first one `greed` times its share.

    The first `num_hostile` clients send hostile programs (hostile.py), whose verdicts are not compared.
    """

    num_seconds: float = 600.0
    num_submissions: int = 500
    num_clients: int = 4
    num_hostile: int = 0
    overload: float = 2.0
    greed: float = 1.0
    max_queue: int = 32
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ClientFigures:
    """The figures of one client. `num_sandboxed` counts verdicts that needed a sandbox, from the first refusal of any
    client to the end of the requests. `share` is this client's share of all such verdicts. `is_hostile`: see LoadPlan.
    """

    name: str
    asked_per_second: float
    num_sent: int
    num_sent_again: int
    num_verdicts: int
    num_sandboxed: int
    num_refused: int
    num_given_up: int
    share: float
    p50_s: float
    p99_s: float
    is_hostile: bool = False

    @property
    def num_compared(self) -> int:
        """The number of verdicts that were compared with those of an idle service."""
        return 0 if self.is_hostile else self.num_verdicts


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The result of one run. `num_metered` is the number of verdicts by the service's own metrics."""

    backend: str
    num_cores: int
    num_slots: int
    plan: LoadPlan
    idle_per_second: float
    capacity_per_second: float
    wall_s: float
    verdicts: dict[str, int]  # the expected verdicts, each submission once
    clients: tuple[ClientFigures, ...]
    statuses: dict[int, int]
    retry_after_s: dict[int, int]
    num_unanswered: int
    num_faults: int
    num_wrong: int
    num_metered: int
    num_internal_errors: int
    num_stray_bytes: int
    still_ready: bool
    first_minute: Holding
    last_minute: Holding
    peak_memory_bytes: int
    client_cpu_share: float
    notes: tuple[str, ...]

    @property
    def unevenness(self) -> float:
        """The largest number of sandboxes of a client divided by the smallest, minus 1; 0 is even."""
        counts = [client.num_sandboxed for client in self.clients]
        return max(counts) / max(1, min(counts)) - 1

    @property
    def is_fair(self) -> bool:
        """Whether all clients got about the same number of sandboxes."""
        counts = [client.num_sandboxed for client in self.clients]
        return max(counts) - min(counts) <= max(_FAIR_COUNT, _FAIR * min(counts))


def figures(
    name: str, tally: Tally, num_seconds: float, num_sandboxed: int, num_sandboxed_in_all: int, is_hostile: bool
) -> ClientFigures:
    """The figures of one client."""
    times = sorted(tally.latencies_s) or [0.0]
    return ClientFigures(
        name=name,
        asked_per_second=tally.num_sent / num_seconds,
        num_sent=tally.num_sent,
        num_sent_again=tally.num_sent_again,
        num_verdicts=len(tally.latencies_s),
        num_sandboxed=num_sandboxed,
        num_refused=tally.statuses[429],
        num_given_up=tally.num_given_up,
        share=num_sandboxed / max(1, num_sandboxed_in_all),
        p50_s=times[len(times) // 2],
        p99_s=times[min(len(times) - 1, round(0.99 * len(times)))],
        is_hostile=is_hostile,
    )


def complaints(result: LoadResult) -> list[str]:
    """One sentence for each failed check."""
    num_verdicts = result.statuses.get(200, 0)
    first, last = result.first_minute, result.last_minute
    most_bytes = first.memory_bytes * (1 + _MORE_MEMORY) + _MORE_MEMORY_BYTES
    checks = (
        (result.still_ready, "the service is not ready at the end"),
        (not result.num_unanswered, f"{result.num_unanswered} requests were never answered"),
        (not result.num_faults, f"{result.num_faults} requests failed"),
        (not result.num_wrong, f"{result.num_wrong} answers are wrong"),
        (not result.num_stray_bytes, f"{result.num_stray_bytes} bytes answer no request"),
        (result.num_metered == num_verdicts, f"{num_verdicts} verdicts came, the service counted {result.num_metered}"),
        (set(result.statuses) <= {200, 429}, f"statuses {result.statuses}"),
        (bool(result.retry_after_s), "nothing was refused, so the service was not overloaded"),
        (not result.num_internal_errors, f"{result.num_internal_errors} internal errors"),
        (result.is_fair, f"the shares differ by {result.unevenness:.1%}"),
        (last.memory_bytes <= most_bytes, f"memory grew from {_mib(first)} to {_mib(last)} MiB"),
        (
            last.num_descriptors <= first.num_descriptors + _MORE_DESCRIPTORS,
            f"descriptors grew from {first.num_descriptors} to {last.num_descriptors}",
        ),
    )
    return [sentence for passed, sentence in checks if not passed]


def as_record(result: LoadResult) -> dict[str, Any]:
    """The result as a record for scripts."""
    return asdict(result) | {"unevenness": result.unevenness, "complaints": complaints(result)}


def as_text(result: LoadResult) -> str:
    """The result as readable lines."""
    plan, first, last = result.plan, result.first_minute, result.last_minute
    sent = sum(client.asked_per_second for client in result.clients)
    answered = result.statuses.get(200, 0) / plan.num_seconds
    wrong = complaints(result)
    lines = [
        f"backend {result.backend}, {result.num_cores} cores, {result.num_slots} slots, cache off, queue"
        f" {plan.max_queue}, clients and service on the same cores (clients: {result.client_cpu_share:.0%} of one)",
        f"{plan.num_submissions} submissions, idle: "
        + ", ".join(f"{count} {verdict}" for verdict, count in sorted(result.verdicts.items())),
        f"capacity {result.capacity_per_second:.1f} submissions/s, idle {result.idle_per_second:.1f}/s;"
        f" for {result.wall_s:.0f} s {sent:.1f}/s sent, {answered:.1f}/s answered",
        *_client_lines(result.clients),
        f"shares within {result.unevenness:.1%}; statuses {result.statuses}; Retry-After in s {result.retry_after_s}",
        f"{sum(client.num_compared for client in result.clients)} verdicts compared with those of the idle service",
        f"unanswered {result.num_unanswered}, failed {result.num_faults}, wrong {result.num_wrong},"
        f" stray bytes {result.num_stray_bytes}, internal errors {result.num_internal_errors},"
        f" verdicts the service counted {result.num_metered}",
        f"first and last minute: memory {_mib(first)} and {_mib(last)} MiB (peak {result.peak_memory_bytes >> 20}),"
        f" descriptors {first.num_descriptors} and {last.num_descriptors},"
        f" processes {first.num_processes} and {last.num_processes}",
        *result.notes[:20],
        "all checks passed" if not wrong else "FAILED: " + "; ".join(wrong),
    ]
    return "\n".join(lines)


def _client_lines(clients: Sequence[ClientFigures]) -> list[str]:
    head = f"{'client':12}{'sent/s':>9}{'sent':>8}{'resent':>8}{'verdicts':>10}{'refused':>9}{'abandoned':>10}"
    rows = [
        f"{c.name + (' !' if c.is_hostile else ''):12}{c.asked_per_second:9.1f}{c.num_sent:8}{c.num_sent_again:8}"
        f"{c.num_verdicts:10}{c.num_refused:9}{c.num_given_up:10}{c.share:8.1%}{c.p50_s:9.2f}{c.p99_s:9.2f}"
        for c in clients
    ]
    return [head + f"{'share':>8}{'p50 s':>9}{'p99 s':>9}", *rows]


def _mib(held: Holding) -> int:
    return held.memory_bytes >> 20
