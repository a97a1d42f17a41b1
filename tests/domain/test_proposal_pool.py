"""The pool of a self-play: bounded, each problem once, each that leaves has one reason, none is trained on too long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nouscoder.domain.curriculum import ProblemStatistics, potential
from nouscoder.domain.proposal_pool import PooledProblem, PoolRules, Retired, next_pool

_rules = st.builds(PoolRules, size=st.integers(1, 6), max_age=st.integers(1, 4), solved_at=st.floats(0.5, 1))
_rates = st.sampled_from([0.125, 0.25, 0.5, 0.75, 0.875])
# For each round: which problems are trained on with what result, and how many are accepted before it.
_outcomes = st.tuples(st.integers(0, 8), st.integers(0, 8)).map(lambda pair: (min(pair), max(pair)))
_rounds = st.lists(st.tuples(st.lists(_rates, max_size=5), st.lists(_outcomes, max_size=12)), max_size=8)


def statistics(name: str, accepted: int, sampled: int) -> ProblemStatistics:
    return ProblemStatistics(name, groups=1, sampled=sampled, accepted=accepted)


@given(_rules, _rounds)
def test_in_any_history_the_invariants_hold(
    rules: PoolRules, rounds: list[tuple[list[float], list[tuple[int, int]]]]
) -> None:
    pool: tuple[PooledProblem, ...] = ()
    gone: set[str] = set()
    admitted: set[str] = set()
    for number, (rates, outcomes) in enumerate(rounds):
        trained = {
            one.problem_id: statistics(one.problem_id, *outcome) for one, outcome in zip(pool, outcomes, strict=False)
        }
        accepted = [PooledProblem(f"r{number}-{place}", rate) for place, rate in enumerate(rates)]
        admitted |= {one.problem_id for one in accepted}
        before = {one.problem_id for one in pool}
        change = next_pool(pool, trained, accepted, rules)
        pool = change.pool
        names = [one.problem_id for one in pool]
        assert len(names) <= rules.size
        assert len(set(names)) == len(names)
        assert all(one.age < rules.max_age for one in pool)
        assert set(names) | set(change.retired) == before | {one.problem_id for one in accepted}
        assert not set(names) & set(change.retired)
        assert not gone & set(names), "what was retired does not come back"
        gone |= set(change.retired)
    assert gone | {one.problem_id for one in pool} == admitted


@given(_rules, st.integers(1, 8), st.integers(0, 8))
def test_why_a_trained_problem_leaves(rules: PoolRules, sampled: int, accepted: int) -> None:
    accepted = min(accepted, sampled)
    change = next_pool([PooledProblem("p", 0.5)], {"p": statistics("p", accepted, sampled)}, [], rules)
    if accepted / sampled >= rules.solved_at:
        assert change.retired == {"p": Retired.SOLVED}
    elif not accepted:
        assert change.retired == {"p": Retired.NEVER_SOLVED}
    elif rules.max_age == 1:
        assert change.retired == {"p": Retired.OLD}
    else:
        assert change.pool == (PooledProblem("p", accepted / sampled, age=1, groups=1),)


def test_a_problem_that_no_rollout_tried_grows_older_and_keeps_its_pass_rate() -> None:
    rules = PoolRules(max_age=3)
    pool: tuple[PooledProblem, ...] = (PooledProblem("p", 0.25),)
    ages = []
    while pool:
        ages.append(pool[0].age)
        assert pool[0].pass_rate == 0.25
        change = next_pool(pool, {"p": statistics("p", 0, 0)}, [], rules)
        pool = change.pool
    assert ages == [0, 1, 2]
    assert change.retired == {"p": Retired.OLD}


@given(st.lists(_rates, min_size=1, max_size=9), st.integers(1, 9))
def test_without_room_the_most_learnable_stay_and_of_equal_ones_the_younger(rates: list[float], size: int) -> None:
    old = [PooledProblem(f"old-{place}", rate) for place, rate in enumerate(rates)]
    new = [PooledProblem(f"new-{place}", rate) for place, rate in enumerate(rates)]
    change = next_pool(old, {}, new, PoolRules(size=size))
    left = [one for one in (*old, *new) if one.problem_id in change.retired]
    assert set(change.retired.values()) <= {Retired.NO_ROOM}
    assert len(change.pool) == min(size, 2 * len(rates))
    worst = min(potential(one.pass_rate) for one in change.pool)
    assert all(potential(one.pass_rate) <= worst for one in left)
    for one in new:  # its old twin has the same potential
        assert one.problem_id not in change.retired or f"old-{one.problem_id[4:]}" in change.retired
