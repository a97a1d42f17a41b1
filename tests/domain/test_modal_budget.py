"""The budget of Modal's containers: no sequence of creations and ends exceeds a cap, whatever the containers do."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.config import ModalSection
from nouscoder.verifier.sandbox.base import Cap
from nouscoder.verifier.sandbox.modal.containers import Budget

WIDE = {"max_containers": 100, "creations_per_minute": 1000, "dollars_per_minute": 1e6, "dollars": 1e6}


def budget(rate: float = 0.01, lifetime_s: float = 600, **caps: float) -> Budget:
    """A budget whose caps are wide except those named. A container costs `rate` dollars a second."""
    price = {"dollars_per_core_s": rate, "dollars_per_gib_s": 0.0}
    return Budget(ModalSection(**{**WIDE, **price, "lifetime_s": lifetime_s, **caps}))


@pytest.mark.parametrize(
    ("caps", "cap"),
    [
        ({"max_containers": 3}, Cap.CONTAINERS),
        ({"creations_per_minute": 3}, Cap.CREATIONS),
        ({"dollars_per_minute": 3 * 0.01 * 60}, Cap.DOLLARS_PER_MINUTE),
        ({"dollars": 3 * 0.01 * 600}, Cap.DOLLARS),
    ],
)
def test_each_cap_admits_three_and_names_itself(caps: dict[str, float], cap: Cap) -> None:
    one = budget(**caps)
    assert [one.admit(str(number), 0.0) for number in range(4)] == [600, 600, 600, cap]
    setting = "max_containers" if cap is Cap.CONTAINERS else cap.value
    assert f"modal.{setting} = {caps[setting]:g} " in one.explain(cap)


def test_the_last_container_lives_only_as_long_as_the_money_lasts() -> None:
    one = budget(dollars=0.01 * 700)
    assert one.admit("a", 0.0) == 600
    assert one.admit("b", 0.0) == 100
    assert one.admit("c", 0.0) is Cap.DOLLARS
    one.ended("a", 50.0)  # pays for 50 s instead of 600
    assert one.admit("c", 50.0) == 550


def test_creations_of_the_last_minute_count_also_when_they_were_refused() -> None:
    one = budget(creations_per_minute=2)
    one.admit("a", 0.0)
    one.refused("a")
    one.admit("b", 30.0)
    assert one.admit("c", 59.9) is Cap.CREATIONS
    assert one.admit("c", 60.0) == 600
    assert one.admit("d", 60.0) is Cap.CREATIONS


@dataclass(frozen=True)
class Event:
    """After `pause_s` the container of `index` is made, ended or refused."""

    kind: str
    index: int
    pause_s: float


events = st.lists(
    st.builds(Event, st.sampled_from(["admit", "admit", "ended", "refused"]), st.integers(0, 12), st.floats(0, 40)),
    max_size=60,
)


@given(events, st.floats(0.1, 30), st.integers(1, 6), st.integers(1, 8), st.floats(0.5, 5))
def test_no_cap_is_ever_exceeded(
    sequence: list[Event], dollars: float, containers: int, creations: int, per_minute: float
) -> None:
    """The truth is counted apart: each container lives until it is ended, or until its own lifetime has passed."""
    rate = 0.01
    caps = {"max_containers": containers, "creations_per_minute": creations}
    one = budget(rate, 300, **caps, dollars_per_minute=per_minute, dollars=dollars)
    begun: dict[str, tuple[float, int]] = {}
    asked: list[float] = []
    paid, now = 0.0, 0.0
    for number, event in enumerate(sequence):
        now += event.pause_s
        if event.kind == "admit":
            name = f"{number}"
            lifetime_s = one.admit(name, now)
            if not isinstance(lifetime_s, Cap):
                begun[name] = (now, lifetime_s)
                asked.append(now)
        elif begun:
            name = sorted(begun)[event.index % len(begun)]
            start_s, lifetime_s = begun.pop(name)
            if event.kind == "ended":
                one.ended(name, now)
                paid += rate * min(lifetime_s, now - start_s)
            else:
                one.refused(name)
        worst = paid + sum(rate * lifetime_s for _, lifetime_s in begun.values())
        spent = paid + sum(rate * min(life, now - start_s) for start_s, life in begun.values())
        assert worst <= dollars + 1e-6
        assert abs(one.spent(now) - spent) < 1e-6
        assert len(begun) <= containers
        assert len(begun) * rate * 60 <= per_minute + 1e-6
        assert all(sum(t - 60 < other <= t for other in asked) <= creations for t in asked)
