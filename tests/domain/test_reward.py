"""The reward of each verdict. Infrastructure failures have none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.domain.reasoning import has_thinking
from nouscoder.domain.reward import (
    NoThinkingReward,
    OverlongReward,
    RewardRule,
    RewardTerms,
    group_length_rewards,
    reward_of,
    reward_of_verdict,
    soft_overlong_punishment,
)
from nouscoder.domain.rollout import RolloutHeader
from nouscoder.domain.tokens import FinishReason
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


BY_VERDICT = [rule for rule in RewardRule if rule is not RewardRule.CALLABLE]


def header(num_tokens: int = 5, finish: FinishReason = FinishReason.STOP, num_turns: int = 1) -> RolloutHeader:
    return RolloutHeader("g000001-2", "g000001", "p", num_tokens, 2, 0, 0, finish, 100, 60, 40, num_turns)


@pytest.mark.parametrize("rule", BY_VERDICT)
def test_the_reward_of_a_rollout_follows_its_verdict_and_a_fault_names_the_rollout(rule: RewardRule) -> None:
    for kind in (VerdictKind.ACCEPTED, VerdictKind.WRONG_ANSWER):
        given = verdict(kind, passed=10 if kind is VerdictKind.ACCEPTED else 3)
        assert reward_of(header(), given, RewardTerms(rule)) == reward_of_verdict(given, rule)
    with pytest.raises(ValueError, match="g000001-2: an internal_error"):
        reward_of(header(), verdict(VerdictKind.INTERNAL_ERROR), RewardTerms(rule))


def test_the_format_of_tinkers_code_rl_costs_a_tenth_where_it_is_missing() -> None:
    """0.1 * (has a code block - 1) + right."""
    kinds = (VerdictKind.ACCEPTED, VerdictKind.WRONG_ANSWER, VerdictKind.COMPILE_ERROR, VerdictKind.NO_CODE)
    passed = [10 if kind is VerdictKind.ACCEPTED else 0 for kind in kinds]
    given = [verdict(kind, passed=count) for kind, count in zip(kinds, passed, strict=True)]
    assert [reward_of_verdict(one, RewardRule.BINARY_FORMAT) for one in given] == [1.0, 0.0, 0.0, -0.1]


@pytest.mark.parametrize(
    ("kind", "num_turns", "expected"),
    [
        (VerdictKind.ACCEPTED, 1, 1.1),
        (VerdictKind.ACCEPTED, 6, 1.1),
        (VerdictKind.ACCEPTED, 7, 1.0),
        (VerdictKind.WRONG_ANSWER, 1, 0.1),
        (VerdictKind.WRONG_ANSWER, 8, 0.0),
        (VerdictKind.NO_CODE, 1, -0.1),
        (VerdictKind.NO_CODE, 7, -0.2),
    ],
)
def test_r1_code_interpreter_pays_for_the_format_and_charges_for_turns(
    kind: VerdictKind, num_turns: int, expected: float
) -> None:
    terms = RewardTerms(RewardRule.R1_CODE_INTERPRETER)
    assert reward_of(header(num_turns=num_turns), verdict(kind), terms) == pytest.approx(expected)


def test_a_punished_overlong_rollout_has_the_fixed_reward_whatever_its_verdict() -> None:
    terms = RewardTerms(RewardRule.BINARY, OverlongReward.PUNISHED, punished_reward=-0.5)
    for kind in (VerdictKind.ACCEPTED, VerdictKind.WRONG_ANSWER):
        assert reward_of(header(finish=FinishReason.LENGTH), verdict(kind), terms) == -0.5
        assert reward_of(header(), verdict(kind), terms) == reward_of_verdict(verdict(kind), RewardRule.BINARY)


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0.0), (60, 0.0), (61, -1 / 40), (80, -0.5), (100, -1.0), (130, -1.0)]
)
def test_the_soft_overlong_punishment_falls_from_zero_to_minus_one(num_tokens: int, expected: float) -> None:
    assert soft_overlong_punishment(num_tokens, max_tokens=100, buffer_tokens=40) == pytest.approx(expected)
    terms = RewardTerms(RewardRule.SIGN, OverlongReward.SOFT, buffer_tokens=40, max_new_tokens=100)
    rewarded = reward_of(header(num_tokens + 2), verdict(VerdictKind.ACCEPTED), terms)
    assert rewarded == pytest.approx(1.0 + expected), "the prompt's two tokens do not count"


def test_the_length_reward_prefers_short_right_rollouts_and_never_pays_wrong_ones() -> None:
    right, wrong = [True] * 3, [False] * 3
    assert group_length_rewards([10, 20, 30], right) == [0.5, 0.0, -0.5]
    assert group_length_rewards([10, 20, 30], wrong) == [0.0, 0.0, -0.5]
    assert group_length_rewards([7, 7, 7], right) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nIt is two.\n</think>\nprint(2)", True),
        ("It is two.</think>print(2)", True),  # the template ended with <think>
        ("<think>\n\n</think>\nprint(2)", False),
        ("</think>print(2)", False),
        ("<think>It is two. print(2)", False),
        ("print(2)", False),
        ("", False),
    ],
)
def test_a_thinking_part_is_closed_and_not_empty(text: str, expected: bool) -> None:
    assert has_thinking(text) is expected


@pytest.mark.parametrize("rule", BY_VERDICT)
@pytest.mark.parametrize("kind", [VerdictKind.ACCEPTED, VerdictKind.WRONG_ANSWER])
def test_the_fixed_reward_is_for_a_missing_thinking_part_only(rule: RewardRule, kind: VerdictKind) -> None:
    given = verdict(kind, passed=10 if kind is VerdictKind.ACCEPTED else 3)
    terms, plain = RewardTerms(rule, no_thinking=NoThinkingReward.PUNISHED), reward_of_verdict(given, rule)
    assert reward_of(header(), given, terms) == -0.5
    assert reward_of(header(), given, RewardTerms(rule)) == plain
    assert reward_of(replace(header(), has_thinking=True), given, terms) == plain


def test_a_punished_overlong_rollout_has_the_fixed_reward_alone() -> None:
    terms = RewardTerms(overlong=OverlongReward.PUNISHED, punished_reward=-2.0, no_thinking=NoThinkingReward.PUNISHED)
    assert reward_of(header(finish=FinishReason.LENGTH), verdict(VerdictKind.ACCEPTED, passed=10), terms) == -2.0
