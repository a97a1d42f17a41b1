"""A run whose groups are all filtered warns by name and ends by its own bound."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from nouscoder.config import Config, load_config
from nouscoder.domain.run_status import Ledger, RunStatus
from nouscoder.run.learning_signal import WARN_AFTER_S, LearningSignal, NothingToLearn, all_retired


class Clock:
    """A clock that the test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def status(filtered: int, *, accepted: int = 0, trained: int = 0, ready: int = 0, others: int = 0) -> RunStatus:
    """A run that has graded what it filtered, trained and holds ready."""
    ledger = Ledger(filtered + trained + ready, trained, filtered, 0, 0, {"ready": ready})
    graded = filtered + trained + ready + others
    return RunStatus("run", ledger, (), 0, 0, 0, 0, False, rollouts_accepted=accepted, rollouts_graded=graded)


def config(*more: str) -> Config:
    """Batches of 64, a bound of 10 batches."""
    return load_config(None, ["broker.batch_size=64", "run.max_filtered_batches=10", *more])


def test_a_policy_that_solves_nothing_is_named_within_a_minute() -> None:
    clock = Clock()
    signal = LearningSignal(config(), clock)
    assert signal.judge(status(0)) is None
    assert signal.judge(status(8)) is None
    clock.now_s = WARN_AFTER_S
    assert WARN_AFTER_S < 60
    warning = signal.judge(status(16))
    assert warning is not None
    assert warning.startswith("warning: all_filtered: 0 of 16 accepted: the policy solves none of these problems")


def test_a_whole_batch_of_filtered_rollouts_is_named_at_once_and_again_when_it_doubles() -> None:
    signal = LearningSignal(config(), Clock())
    counts = (0, 32, 64, 100, 128, 200, 256)
    said = [filtered for filtered in counts if signal.judge(status(filtered)) is not None]
    assert said == [64, 128, 256]


@pytest.mark.parametrize(
    ("accepted", "reason"),
    [(0, "the policy solves none"), (64, "the policy always solves"), (32, "each problem is solved always or never")],
)
def test_the_reason_follows_from_the_counts(accepted: int, reason: str) -> None:
    signal = LearningSignal(config(), Clock())
    signal.judge(status(0))
    assert reason in (signal.judge(status(64, accepted=accepted)) or "")


def test_a_policy_that_training_broke_is_not_told_to_take_other_problems() -> None:
    """Before: "0 of 64 accepted: the policy solves none of these problems, ...; take other problems"."""
    signal = LearningSignal(config(), Clock())
    signal.judge(status(0, accepted=40, trained=128))
    warning = signal.judge(status(64, accepted=40, trained=128)) or ""
    assert "0 of 64 accepted, and 31% before: the training has broken the policy" in warning
    assert "a lower learner.learning_rate" in warning
    assert "take other problems" not in warning
    with pytest.raises(NothingToLearn, match="the training has broken the policy"):
        signal.judge(status(640, accepted=40, trained=128))


@pytest.mark.parametrize(("accepted", "trained"), [(0, 128), (5, 128), (40, 0)], ids=["never", "rarely", "untrained"])
def test_few_problems_that_were_solved_before_prove_nothing(accepted: int, trained: int) -> None:
    signal = LearningSignal(config(), Clock())
    signal.judge(status(0, accepted=accepted, trained=trained))
    assert "the policy solves none" in (signal.judge(status(64, accepted=accepted, trained=trained)) or "")


def test_the_run_ends_at_its_bound() -> None:
    signal = LearningSignal(config(), Clock())
    signal.judge(status(0))
    signal.judge(status(639))
    with pytest.raises(NothingToLearn, match=r"^the run ended: 0 of 640 accepted.*run.max_filtered_batches"):
        signal.judge(status(640))


def test_a_bound_of_0_never_ends_a_run() -> None:
    signal = LearningSignal(config("run.max_filtered_batches=0"), Clock())
    signal.judge(status(0))
    assert signal.judge(status(1_000_000)) is not None


@pytest.mark.parametrize("kept", [{"trained": 64}, {"ready": 8}])
def test_a_group_that_is_kept_begins_the_count_again(kept: dict[str, int]) -> None:
    clock = Clock()
    signal = LearningSignal(config(), clock)
    signal.judge(status(0))
    signal.judge(status(600))
    clock.now_s = 1000.0
    assert signal.judge(status(700, **kept)) is None
    assert signal.judge(status(760, **kept)) is None
    assert "0 of 64 accepted" in (signal.judge(status(764, **kept)) or "")


def test_refused_problems_are_named_and_a_run_without_any_left_ends() -> None:
    signal = LearningSignal(config(), Clock())
    few = replace(status(0), num_problems=5, refused_problems=1, refused_reason="a prompt of 900 tokens")
    assert "of 1 of 5 problems, which are not asked again, such as: a prompt of 900" in (signal.judge(few) or "")
    assert signal.judge(few) is None
    with pytest.raises(NothingToLearn, match="no rollout of any of the 5 problems, such as: a prompt of 900 tokens"):
        signal.judge(replace(few, refused_problems=5))


def test_a_run_whose_problems_are_all_retired_for_good_ends_without_a_failure() -> None:
    retired = replace(status(0), num_problems=5, all_retired=True)
    assert LearningSignal(config(), Clock()).judge(retired) is None
    assert re.search(r"no problem is left.*retired.*recheck_epochs", all_retired(retired))
    assert all_retired(replace(status(0), num_problems=5)) == all_retired(replace(retired, finished=True)) == ""
