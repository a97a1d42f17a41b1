"""The statistics of an evaluation: intervals, tests, windows of dates, prompts, and how results are added up."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.domain.estimates import bootstrap_interval, sign_test
from nouscoder.domain.problem import GradingRules
from nouscoder.errors import Unusable
from nouscoder.evaluation.comparison import compare
from nouscoder.evaluation.outcomes import Outcome, ProblemOutcomes, results
from nouscoder.evaluation.problems import EvaluatedProblem, NothingToEvaluate, Window, rating_of, window_named
from nouscoder.evaluation.samples import sample_seed
from nouscoder.record_log import LogUnusable, RecordLog
from nouscoder.report.evaluation_page import spread

PROBLEM = EvaluatedProblem("p", "Add.", "", "easy", "leetcode", "2024-09-01", "stdin", "sha256:0", GradingRules())


@given(st.integers(0, 5), st.integers(0, 5))
def test_the_sign_test_counts_the_outcomes_that_are_as_extreme(better: int, worse: int) -> None:
    total = better + worse
    tail = sum(min(sum(coins), total - sum(coins)) <= min(better, worse) for coins in product((0, 1), repeat=total))
    assert sign_test(better, worse) == pytest.approx(float(Fraction(tail, 2**total)))
    assert sign_test(better, worse) == sign_test(worse, better)


def test_the_sign_test_of_many_problems_is_exact() -> None:
    assert sign_test(0, 0) == 1.0
    assert sign_test(8, 0) == 2 / 256
    assert sign_test(1000, 1100) == pytest.approx(0.0308, abs=5e-4)  # the normal approximation gives 0.0307


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(0, 9))
def test_a_bootstrap_interval_is_inside_the_values_and_is_the_same_each_time(values: list[float], seed: int) -> None:
    low, high = bootstrap_interval(values, seed, resamples=100)
    assert min(values) - 1e-12 <= low <= high <= max(values) + 1e-12
    assert (low, high) == bootstrap_interval(values, seed, resamples=100)


def test_a_bootstrap_interval_agrees_with_the_normal_one_on_many_values() -> None:
    low, high = bootstrap_interval([1.0] * 300 + [0.0] * 700)
    margin = 1.96 * (0.3 * 0.7 / 1000) ** 0.5
    assert low == pytest.approx(0.3 - margin, abs=0.006)
    assert high == pytest.approx(0.3 + margin, abs=0.006)


@pytest.mark.parametrize(
    ("date", "inside"),
    [
        ("2024-08-01T00:00:00", True),
        ("2024-07-31T23:59:59", False),
        ("2025-05-01", True),
        ("2025-05-01T00:00:00", True),
        ("2025-05-01T10:30:00", False),  # as LiveCodeBench compares
        ("", False),
    ],
)
def test_the_window_of_livecodebench_v6_holds_its_dates(date: str, inside: bool) -> None:
    assert window_named("lcb-v6").holds(date) is inside
    assert Window().holds(date)


def test_a_bound_or_a_window_that_does_not_exist_is_named() -> None:
    with pytest.raises(NothingToEvaluate, match="'August' is not a date"):
        Window("August")
    with pytest.raises(NothingToEvaluate, match="'lcb-v9' is none of lcb-v6"):
        window_named("lcb-v9")


def test_seeds_differ_and_fit_in_32_bits() -> None:
    seeds = {sample_seed(seed, name, position) for seed in (0, 1) for name in "ab" for position in range(500)}
    assert len(seeds) == 2000
    assert all(0 < seed < 2**31 for seed in seeds)


def outcomes(name: str, month: str, verdicts: list[str], **other: list[str]) -> ProblemOutcomes:
    """A problem with one sample for each verdict of `process`; `other` has those of another profile."""
    samples = [
        Outcome(at, 100 * at, 10 * at, at == 1, {"process": verdict, **{key: all[at] for key, all in other.items()}})
        for at, verdict in enumerate(verdicts)
    ]
    return ProblemOutcomes(replace(PROBLEM, problem_id=name, date=f"{month}-01"), samples)


RIGHT, WRONG = "accepted", "wrong_answer"


def test_results_are_added_up_by_problem_and_group() -> None:
    found = [
        outcomes("a", "2024-09", [RIGHT, WRONG, WRONG, WRONG], lcb=[RIGHT, RIGHT, WRONG, WRONG]),
        outcomes("b", "2024-10", [RIGHT] * 4, lcb=[RIGHT] * 4),
        outcomes("c", "2024-10", [WRONG] * 4, lcb=[WRONG] * 4),
    ]
    found[2] = replace(found[2], problem=replace(found[2].problem, languages=("cpp", "python")))
    record = results(found, ["process", "lcb"])
    process = record["profiles"]["process"]
    # a: 1 of 4 right, so pass@2 = 1 - C(3, 2) / C(4, 2) = 1/2.
    wanted = {"1": 1.25 / 3, "2": 1.5 / 3, "4": 2 / 3}
    assert {k: one["value"] for k, one in process["pass_at_k"].items()} == pytest.approx(wanted)
    assert [(row["name"], row["num_problems"], row["value"]) for row in process["by"]["month"]] == [
        ("2024-09", 1, 0.25),
        ("2024-10", 2, 0.5),
    ]
    assert [(row["name"], row["value"]) for row in process["by"]["language"]] == [
        ("cpp, python", 0.0),
        ("python", 0.625),
    ]
    assert process["verdicts"] == {WRONG: 7, RIGHT: 5}
    assert [(one["problem_id"], one["position"]) for one in record["disagreements"]] == [("a", 1)]
    assert record["truncated"] == {"samples": 3, "accepted": 1}
    lengths = record["lengths"]
    assert (lengths["unit"], lengths["bin_width"], lengths["mean"]) == ("tokens", 2, 15)
    assert sum(lengths["accepted"]) == 5
    assert sum(lengths["others"]) == 7
    assert json.loads(json.dumps(record)) == record


def test_problems_with_a_rating_give_an_elo_rating_and_others_do_not_count() -> None:
    rated = outcomes("a", "2024-09", [RIGHT, WRONG])
    rated = replace(rated, problem=replace(rated.problem, rating=1700.0))
    found = [rated, outcomes("b", "2024-09", [WRONG, WRONG])]
    elo = results(found, ["process"])["profiles"]["process"]["elo"]
    assert (elo["num_problems"], elo["value"]) == (1, pytest.approx(1700.0))
    assert elo["low"] < 1700.0 < elo["high"]
    assert results(found[1:], ["process"])["profiles"]["process"]["elo"] is None


@pytest.mark.parametrize(
    ("metadata", "rating"),
    [
        ({"rating": "1700"}, 1700.0),
        ({"cf_rating": "800"}, 800.0),
        ({"cf_rating": "0"}, None),
        ({"rating": "hard"}, None),
        ({"rating": "nan"}, None),
        ({"rating": "1e9"}, None),
        ({}, None),
    ],
)
def test_the_rating_of_a_problem_is_in_its_metadata(metadata: dict[str, str], rating: float | None) -> None:
    assert rating_of(metadata) == rating


def test_the_examples_of_a_problem_are_its_first_right_and_its_first_wrong_sample() -> None:
    assert outcomes("a", "2024-09", [WRONG, WRONG, RIGHT, WRONG]).examples("process") == [0, 2]
    assert outcomes("a", "2024-09", [RIGHT, RIGHT]).examples("process") == [0]
    assert spread(range(10), 4) == [0, 2, 5, 7]
    assert spread(range(3), 4) == [0, 1, 2]


def report(folder: Path, accepted: dict[str, int], num_samples: int = 1, tests: str = "sha256:0") -> Path:
    """A folder with the report of an evaluation."""
    problems: list[dict[str, Any]] = [
        {"problem_id": name, "tests_digest": tests, "num_samples": num_samples, "accepted": {"process": count}}
        for name, count in accepted.items()
    ]
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps({"profiles": {"process": {}}, "problems": problems}))
    return folder


def test_a_comparison_pairs_problems_and_lists_those_that_differ(tmp_path: Path) -> None:
    before = report(tmp_path / "a", {f"p{n}": int(n < 4) for n in range(20)} | {"old": 1})
    after = report(tmp_path / "b", {f"p{n}": int(2 <= n < 14) for n in range(20)})
    found = compare(before, after)
    assert (found.num_problems, found.num_only_in_one) == (20, 1)
    assert (found.pass_at_1_a, found.pass_at_1_b) == (0.2, 0.6)
    assert (found.num_better, found.num_worse, found.is_mcnemar) == (10, 2, True)
    assert found.p_value == sign_test(10, 2) == pytest.approx(158 / 4096)
    assert 0.0 < found.low < 0.4 < found.high
    assert [one.problem_id for one in found.differences] == ["p0", "p1", *(f"p{n}" for n in range(4, 14))]
    assert "McNemar's exact test: p = 0.03857" in found.text()
    assert json.loads(json.dumps(found.record()))["difference"] == pytest.approx(0.4)


def test_several_samples_a_problem_are_compared_by_their_share(tmp_path: Path) -> None:
    before, after = report(tmp_path / "a", {"p": 1, "q": 4}, 8), report(tmp_path / "b", {"p": 1, "q": 2}, 4)
    found = compare(before, after)
    assert [(one.problem_id, one.a, one.b) for one in found.differences] == [("p", (1, 8), (1, 4))]
    assert not found.is_mcnemar
    assert "exact sign test: p = 1" in found.text()


def test_evaluations_of_other_tests_problems_or_profiles_are_not_compared(tmp_path: Path) -> None:
    a = report(tmp_path / "a", {"p": 1})
    for other, wrong in (
        (report(tmp_path / "b", {"p": 1}, tests="sha256:1"), "p has other tests"),
        (report(tmp_path / "c", {"q": 1}), "have no problem in common"),
        (tmp_path / "absent", "has no report.json"),
    ):
        with pytest.raises(Unusable, match=wrong):
            compare(a, other)
    with pytest.raises(Unusable, match="no verdicts of the profile lcb"):
        compare(a, a, "lcb")


def test_a_log_keeps_whole_records_once_and_cuts_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with RecordLog(path) as log:
        log.add("a", {"text": "é\n\u2028\ud800"})
        log.add("b", {"text": "2"})
        log.add("a", {"text": "another"})
        whole = path.read_bytes()
        assert whole.count(b"\n") == len(log) == 2
    for torn in (b"", b'{"key": "c", "te', b'{"key": "c"}'):
        path.write_bytes(whole + torn)
        with RecordLog(path) as log:
            assert path.read_bytes() == whole
            assert log.get("a")["text"] == "é\n\u2028\ud800"
            log.add("c", {"text": "3"})
            assert log.get("c") == {"key": "c", "text": "3"}
            assert "d" not in log
    for notes in (b"no record\n", b"my notes"):
        path.write_bytes(whole + notes)
        with pytest.raises(LogUnusable, match=r"log\.jsonl, line 3 is not a record with key"):
            RecordLog(path)
        assert path.read_bytes() == whole + notes
