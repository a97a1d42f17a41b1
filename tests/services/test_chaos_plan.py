"""The plan of chaos is decided by the seed, and leaves no fault out."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from nouscoder.bench.chaos_plan import CLOCK_BACK, DECK_S, KINDS_AND_TARGETS, REDIS, FaultKind, count_by_name, plan_of

seeds = st.integers(0, 2**32)


@given(seeds)
def test_two_minutes_have_every_fault_and_pairs_of_different_targets(seed: int) -> None:
    plan = plan_of(seed, 120.0)
    faults = [fault for strike in plan for fault in strike.faults]
    assert {(fault.kind, fault.target) for fault in faults} == set(KINDS_AND_TARGETS)
    pairs = [strike.faults for strike in plan if len(strike.faults) == 2]
    assert len(pairs) >= 7
    assert all(first.target != second.target for first, second in pairs)


@given(seeds, st.floats(1.0, 1000.0))
def test_the_strikes_come_in_order_within_the_duration_and_each_deck_has_the_same_faults(
    seed: int, duration_s: float
) -> None:
    plan = plan_of(seed, duration_s)
    moments = [strike.at_s for strike in plan]
    assert moments == sorted(moments)
    assert all(0 <= at_s < duration_s for at_s in moments)
    one_deck = count_by_name(plan_of(0, DECK_S))
    for deck in range(int(duration_s // DECK_S)):
        strikes = [strike for strike in plan if deck * DECK_S <= strike.at_s < (deck + 1) * DECK_S]
        assert count_by_name(strikes) == one_deck


@given(seeds)
def test_the_seconds_of_a_fault_are_in_its_range(seed: int) -> None:
    for strike in plan_of(seed, DECK_S):
        for fault in strike.faults:
            match fault.kind:
                case FaultKind.ROLL_BACK:
                    assert 0.1 <= fault.seconds <= 5.0
                case FaultKind.SET_CLOCK:
                    assert 15 <= abs(fault.seconds) <= 3600
                    assert (fault.seconds < 0) == (fault.target == CLOCK_BACK)
                case _:
                    assert 0 <= fault.seconds <= 40


def test_a_seed_decides_the_plan() -> None:
    assert plan_of(1, 300.0) == plan_of(1, 300.0) != plan_of(2, 300.0)


def test_redis_forgets_twelve_times_in_five_minutes() -> None:
    for seed in range(5):
        strikes = plan_of(seed, 300.0)
        forgettings = Counter(fault.kind for strike in strikes for fault in strike.faults if fault.loses_writes)
        assert forgettings == {FaultKind.ROLL_BACK: 9, FaultKind.WIPE: 3}
        assert all(fault.target == REDIS for strike in strikes for fault in strike.faults if fault.loses_writes)
