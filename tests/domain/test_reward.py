"""The reward of each verdict. Infrastructure failures have none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.domain.reward import RewardRule, reward_of, reward_of_verdict
from nouscoder.domain.rollout import FinishReason, RolloutHeader
from nouscoder.domain.verdict import Verdict, VerdictKind


def verdict(kind: VerdictKind, passed: int = 0, total: int = 10, graded: int = 10) -> Verdict:
    return Verdict(kind=kind, passed=passed, total=total, graded=graded, duration_s=0.0, backend="fake")


@pytest.mark.parametrize("rule", RewardRule)
def test_an_internal_error_has_no_reward_by_any_rule(rule: RewardRule) -> None:
    with pytest.raises(ValueError, match="internal_error"):
        reward_of_verdict(verdict(VerdictKind.INTERNAL_ERROR), rule)


@pytest.mark.parametrize("kind", [kind for kind in VerdictKind if kind is not VerdictKind.INTERNAL_ERROR])
def test_sign_and_binary_rewards_of_every_verdict(kind: VerdictKind) -> None:
    right = kind is VerdictKind.ACCEPTED
    assert reward_of_verdict(verdict(kind)) == (1.0 if right else -1.0)
    assert reward_of_verdict(verdict(kind), RewardRule.BINARY) == (1.0 if right else 0.0)


@given(st.integers(0, 20), st.integers(1, 20))
def test_a_soft_reward_is_the_share_of_tests_passed(passed: int, total: int) -> None:
    passed = min(passed, total)
    kind = VerdictKind.ACCEPTED if passed == total else VerdictKind.WRONG_ANSWER
    assert reward_of_verdict(verdict(kind, passed, total, graded=total), RewardRule.SOFT) == passed / total


@given(st.integers(0, 9))
def test_a_soft_reward_needs_every_test_run(graded: int) -> None:
    with pytest.raises(ValueError, match="stop_on_first_failure"):
        reward_of_verdict(verdict(VerdictKind.WRONG_ANSWER, 0, 10, graded), RewardRule.SOFT)


@pytest.mark.parametrize("kind", [VerdictKind.NO_CODE, VerdictKind.COMPILE_ERROR])
def test_a_program_that_never_ran_has_soft_reward_zero(kind: VerdictKind) -> None:
    assert reward_of_verdict(verdict(kind, graded=0), RewardRule.SOFT) == 0.0


@pytest.mark.parametrize("rule", RewardRule)
def test_the_reward_of_a_rollout_follows_its_verdict_and_a_fault_names_the_rollout(rule: RewardRule) -> None:
    header = RolloutHeader("g000001-2", "g000001", "p", 5, 2, 0, 0, FinishReason.STOP, 100, 60, 40)
    for kind in (VerdictKind.ACCEPTED, VerdictKind.WRONG_ANSWER):
        given = verdict(kind, passed=10 if kind is VerdictKind.ACCEPTED else 3)
        assert reward_of(header, given, rule) == reward_of_verdict(given, rule)
    with pytest.raises(ValueError, match="g000001-2: an internal_error"):
        reward_of(header, verdict(VerdictKind.INTERNAL_ERROR), rule)
