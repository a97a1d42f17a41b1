"""A run in plain text: one line for a snapshot, and the pieces of text that the panel uses too. Pure."""

from __future__ import annotations

from nouscoder.domain.ledger import IN_FLIGHT, Ledger
from nouscoder.run.snapshot import Snapshot

UNKNOWN = "-"


def plain_line(snapshot: Snapshot) -> str:
    """The snapshot in one line of `name value` pairs, ASCII, without line breaks."""
    parts = [
        snapshot.phase,
        f"batch {snapshot.batch}/{snapshot.total_batches}",
        f"step {snapshot.step}/{snapshot.total_steps}",
        f"pass rate {number(snapshot.pass_rate, '.3f')}",
        f"reward {number(snapshot.reward_mean, '+.3f')}",
        f"staleness {number(snapshot.staleness_mean, '.2f')} max {number(snapshot.staleness_max, 'd')}",
        f"tests/s {number(snapshot.tests_per_second, '.1f')}",
        f"tokens/s {number(snapshot.tokens_per_second, '.0f')}",
        f"policy {number(snapshot.policy_version, 'd')}",
        _ledger_line(snapshot.ledger),
        f"left {duration(snapshot.time_left_s)}",
    ]
    if snapshot.message:
        parts.append(one_line(snapshot.message))
    return " | ".join(parts).encode("ascii", "backslashreplace").decode()


def plain_progress(phase: str, done: int, total: int, note: str = "") -> str:
    """A phase outside the loop in one line."""
    count = f"{done}/{total} ({done / total:.0%})" if total else str(done)
    line = f"{phase} | {count}" + (f" | {one_line(note)}" if note else "")
    return line.encode("ascii", "backslashreplace").decode()


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


def _ledger_line(ledger: Ledger | None) -> str:
    if ledger is None:
        return f"ledger {UNKNOWN}"
    return f"ledger {ledger_numbers(ledger)} | balanced {'yes' if ledger.balanced else 'NO'}"


def one_line(text: str) -> str:
    """The text without line breaks and terminal control characters."""
    return "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))
