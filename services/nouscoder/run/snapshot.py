"""The state of a run at one time, and its texts. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from nouscoder.domain.run_status import IN_FLIGHT, Ledger
from nouscoder.errors import one_line


@dataclass(frozen=True, slots=True)
class ProcessLine:
    """One process of a local run. `state` is a word such as running, restarting, stopped."""

    name: str
    state: str
    pid: int | None = None
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of the run at one time. Unknown values are None.

    `pass_rates` [batches] are those of the batches so far, oldest first. `blockers` are what `nouscoder why-stalled`
    says, None when nobody asked.
    """

    phase: str
    batch: int = 0
    total_batches: int = 0
    step: int = 0
    total_steps: int = 0
    pass_rate: float | None = None
    reward_mean: float | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    tests_per_second: float | None = None
    tokens_per_second: float | None = None
    policy_version: int | None = None
    ledger: Ledger | None = None
    time_left_s: float | None = None
    elapsed_s: float = 0.0
    processes: tuple[ProcessLine, ...] = ()
    learner_state: str = ""
    pass_rates: tuple[float, ...] = ()
    blockers: tuple[str, ...] | None = None


UNKNOWN = "-"


def plain_line(snapshot: Snapshot) -> str:
    """The snapshot in one line of `name value` pairs, ASCII, without line breaks."""
    known, ledger = snapshot.ledger, UNKNOWN
    if known is not None:
        ledger = f"{ledger_numbers(known)} | balanced {'yes' if known.balanced else 'NO'}"
    parts = [
        snapshot.phase,
        *(f"{name} {value}" for name, value in figures(snapshot).items()),
        f"ledger {ledger}",
        f"left {duration(snapshot.time_left_s)}",
    ]
    return " | ".join(parts).encode("ascii", "backslashreplace").decode()


def figures(snapshot: Snapshot) -> dict[str, str]:
    """The figures of the run as texts, by name."""
    return {
        "batch": f"{snapshot.batch}/{snapshot.total_batches}",
        "step": f"{snapshot.step}/{snapshot.total_steps}",
        "pass rate": number(snapshot.pass_rate, ".3f"),
        "reward": number(snapshot.reward_mean, "+.3f"),
        "staleness": f"{number(snapshot.staleness_mean, '.2f')} max {number(snapshot.staleness_max, 'd')}",
        "tests/s": number(snapshot.tests_per_second, ".1f"),
        "tokens/s": number(snapshot.tokens_per_second, ".0f"),
        "policy": number(snapshot.policy_version, "d"),
    }


def plain_progress(phase: str, done: int, total: int, note: str = "") -> str:
    """A phase outside the loop in one line."""
    count = f"{done}/{total} ({done / total:.0%})" if total else str(done or "")
    return " | ".join(filter(None, [phase, count, one_line(note)])).encode("ascii", "backslashreplace").decode()


def duration(seconds: float | None) -> str:
    """A duration such as 4m07s; a dash when it is unknown."""
    if seconds is None:
        return UNKNOWN
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m{rest:02}s" if hours else f"{minutes}m{rest:02}s"


def number(value: float | None, form: str) -> str:
    """The number in a format of Python; a dash when it is unknown."""
    return UNKNOWN if value is None else format(value, form)


def _in_flight(ledger: Ledger) -> str:
    """The in-flight counts that are not 0, in the order of a rollout's life."""
    known = [state.value for state in IN_FLIGHT]
    order = known + sorted(set(ledger.in_flight) - set(known))
    counts = [f"{name} {ledger.in_flight[name]}" for name in order if ledger.in_flight.get(name)]
    return f"in flight {sum(ledger.in_flight.values())}" + (f" ({', '.join(counts)})" if counts else "")


def ledger_numbers(ledger: Ledger) -> str:
    """The ledger as its equation."""
    return (
        f"admitted {ledger.admitted} = trained {ledger.trained} + filtered {ledger.filtered} + stale {ledger.stale}"
        f" + abandoned {ledger.abandoned} + lost {ledger.lost} + {_in_flight(ledger)}"
    )
