"""Kill rates of tests: bounded, separate for each client and set of tests, and only counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.domain.submission import AssertTests, CallCase, CallTests, StdinCase, StdinTests, Submission, Tests
from nouscoder.domain.verdict import TestOutcome, VerdictKind
from nouscoder.verifier.grading.progress import PRIOR_KILLS, PRIOR_RUNS, KillRates, KillTable, hardest_first
from nouscoder.verifier.grading.runs import judge_for


def stdin(*inputs: str) -> StdinTests:
    return StdinTests(tuple(StdinCase(given, "x") for given in inputs))


def table(rates: KillRates, tests: Tests, problem_id: str = "p", client: str = "c") -> KillTable | None:
    submission = Submission(tests, "code", problem_id=problem_id)
    return rates.table(client, submission, judge_for(submission))


def outcome(index: int, kind: VerdictKind) -> TestOutcome:
    return TestOutcome(index, kind, 0.0, 0.0, 0)


RUNS = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from([VerdictKind.ACCEPTED, VerdictKind.WRONG_ANSWER])), max_size=200
)


@given(RUNS)
def test_a_kill_rate_is_the_share_of_failed_runs_smoothed_by_the_prior(runs: list[tuple[int, VerdictKind]]) -> None:
    learned = KillTable(5)
    for index, kind in runs:
        learned.learn([outcome(index, kind)])
    for index, rate in enumerate(learned.rates()):
        mine = [kind for number, kind in runs if number == index]
        kills = sum(kind is VerdictKind.WRONG_ANSWER for kind in mine)
        assert rate == (kills + PRIOR_KILLS) / (len(mine) + PRIOR_RUNS)
        low, high = sorted((PRIOR_KILLS / PRIOR_RUNS, kills / len(mine) if mine else PRIOR_KILLS / PRIOR_RUNS))
        assert low <= rate <= high


@given(st.lists(st.integers(0, 9), min_size=3, max_size=8), st.data())
def test_failing_tests_run_first_then_unseen_ones_by_length_then_passing_ones(
    sizes: list[int], data: st.DataObject
) -> None:
    killer, passed = data.draw(st.permutations(range(len(sizes))))[:2]
    learned = KillTable(len(sizes))
    assert hardest_first(sizes, learned.rates()) == hardest_first(sizes)
    learned.learn([outcome(passed, VerdictKind.ACCEPTED), outcome(killer, VerdictKind.TIME_LIMIT_EXCEEDED)])
    order = hardest_first(sizes, learned.rates())
    assert (order[0], order[-1]) == (killer, passed)
    assert order[1:-1] == [index for index in hardest_first(sizes) if index not in (killer, passed)]


def test_an_infrastructure_failure_does_not_count() -> None:
    learned = KillTable(1)
    learned.learn([outcome(0, VerdictKind.INTERNAL_ERROR)])
    assert learned.rates() == KillTable(1).rates()


def test_counts_are_bounded_and_recent_runs_weigh_more() -> None:
    learned = KillTable(1)
    for _ in range(5000):
        learned.learn([outcome(0, VerdictKind.WRONG_ANSWER)])
    assert learned.rates()[0] > 0.95
    for _ in range(1000):
        learned.learn([outcome(0, VerdictKind.ACCEPTED)])
    assert learned.rates()[0] < 0.1


@pytest.mark.parametrize(
    "tests",
    [stdin("a", "bb"), CallTests("f", (CallCase((1,)), CallCase((2,)))), AssertTests(("assert f(1)", "assert f(2)"))],
)
def test_a_table_is_shared_only_by_the_same_client_problem_and_tests(tests: Tests) -> None:
    rates = KillRates()
    mine = table(rates, tests)
    assert mine is not None
    assert table(rates, tests) is mine
    others = [
        table(rates, tests, problem_id="q"),
        table(rates, tests, client="d"),
        table(rates, stdin("a", "bc")),
        table(rates, stdin("a")),
    ]
    assert mine not in others
    assert None not in others


def test_the_number_and_the_length_of_tables_are_bounded() -> None:
    """The invariant of progress.py."""
    rates = KillRates(max_problems=3, max_tests=2)
    first = table(rates, stdin("a"), "p0")
    for number in range(1, 10):
        assert table(rates, stdin("a"), f"p{number}") is not None
        assert table(rates, stdin("a"), "p0") is first, "a used table is not evicted"
        assert len(rates._tables) <= 3
    assert table(rates, stdin("a", "b", "c")) is None
    assert table(rates, stdin("a"), problem_id="") is None
    assert len(rates._tables) == 3
