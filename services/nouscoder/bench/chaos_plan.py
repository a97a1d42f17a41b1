"""The plan of chaos: which faults come, and when.

It is a pure function of the seed and the duration. The faults are dealt like cards. A deck has every fault, some more
than once. It is shuffled, some faults are joined to pairs, and each pair or single fault gets a time slot of equal
length, in which it comes at a random moment.

INVARIANT: in each `DECK_S` seconds of a plan every fault of `KINDS_AND_TARGETS` comes at least once, and seven pairs of
faults come, each pair at the same moment. The two faults of a pair have different targets. Two faults of Redis never
overlap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from nouscoder.run.local_services import SERVICES

DECK_S = 100.0
_NUM_PAIRS = 7  # of a deck
REDIS = "redis"
CLOCK_FORWARDS = "clock forwards"
CLOCK_BACK = "clock back"


class FaultKind(StrEnum):
    """What happens to the target."""

    KILL = "kill"  # SIGKILL
    STOP = "stop"  # SIGSTOP for some seconds, then SIGCONT
    TWIN = "twin of"  # a second process of the service for some seconds, then SIGKILL
    FILL = "fill"  # no memory is left for some seconds
    ROLL_BACK = "roll back"  # all writes of the last seconds are lost
    WIPE = "wipe"  # everything is lost
    SET_CLOCK = "set"  # Redis' wall clock steps by some seconds


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault. `seconds`: how long it lasts, by how much Redis is rolled back, or how far the clock steps."""

    kind: FaultKind
    target: str
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """Without the seconds, for example `kill broker`."""
        return f"{self.kind} {self.target}"

    @property
    def loses_writes(self) -> bool:
        """Whether Redis loses acknowledged writes."""
        return self.kind in (FaultKind.ROLL_BACK, FaultKind.WIPE)


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault or two that come at the same moment, `at_s` seconds after the beginning."""

    at_s: float
    faults: tuple[PlannedFault, ...]


# The range of the seconds of each fault. A stop may be longer than a lease (10 s), so leases of live workers are in
# question. A twin needs seconds to start, on a busy machine more than ten.
_SECONDS = {
    FaultKind.KILL: (0.1, 5.0),  # of Redis; the supervisor starts a service again at once
    FaultKind.STOP: (0.1, 12.0),
    FaultKind.TWIN: (15.0, 40.0),
    FaultKind.FILL: (0.1, 12.0),
    FaultKind.ROLL_BACK: (0.1, 5.0),
    FaultKind.WIPE: (0.0, 0.0),
}
_CLOCK_STEPS_S = {CLOCK_FORWARDS: (15.0, 3600.0), CLOCK_BACK: (-3600.0, -15.0)}

KINDS_AND_TARGETS = (
    *((kind, target) for kind in (FaultKind.KILL, FaultKind.STOP) for target in (*SERVICES, REDIS)),
    *((FaultKind.TWIN, service) for service in SERVICES),
    (FaultKind.FILL, REDIS),
    (FaultKind.ROLL_BACK, REDIS),
    (FaultKind.WIPE, REDIS),
    (FaultKind.SET_CLOCK, CLOCK_FORWARDS),
    (FaultKind.SET_CLOCK, CLOCK_BACK),
)
_MORE = 2 * ((FaultKind.ROLL_BACK, REDIS),)


def plan_of(seed: int, duration_s: float) -> tuple[Strike, ...]:
    """The strikes in order of time."""
    source, strikes, begin_s = Random(seed), list[Strike](), 0.0
    while begin_s < duration_s:
        # One deck: pairs and single faults, shuffled.
        cards = [_fault(kind, target, source) for kind, target in KINDS_AND_TARGETS + _MORE]
        source.shuffle(cards)
        dealt: list[tuple[PlannedFault, ...]] = []
        for _ in range(_NUM_PAIRS):
            first = cards.pop()
            second = next(card for card in cards if card.target != first.target)
            cards.remove(second)
            dealt.append((first, second))
        dealt += [(card,) for card in cards]
        source.shuffle(dealt)
        slot_s = DECK_S / len(dealt)
        strikes += [Strike(begin_s + (place + source.random()) * slot_s, faults) for place, faults in enumerate(dealt)]
        begin_s += DECK_S
    return tuple(strike for strike in strikes if strike.at_s < duration_s)


def count_by_name(strikes: Iterable[Strike]) -> dict[str, int]:
    """How often each fault comes."""
    return dict(sorted(Counter(fault.name for strike in strikes for fault in strike.faults).items()))


def _fault(kind: FaultKind, target: str, source: Random) -> PlannedFault:
    least, most = _CLOCK_STEPS_S[target] if kind is FaultKind.SET_CLOCK else _SECONDS[kind]
    return PlannedFault(kind, target, source.uniform(least, most))
