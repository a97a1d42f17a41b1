"""Rewards as the broker decides them from its configuration, with functions of a user."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from nouscoder.broker.rewards import Rewards
from nouscoder.config import load_config
from nouscoder.domain.rollout import RolloutHeader
from nouscoder.domain.tokens import FinishReason
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.errors import Unusable

MODULE = """
import math
from dataclasses import replace

def shorter_is_better(rollout, verdict):
    return verdict.passed / verdict.total - 0.01 * (rollout.num_tokens - rollout.num_prompt_tokens)

def nothing(rollout, verdict):
    return math.nan

def broken(rollout, verdict):
    raise KeyError("no such thing")

number = 3
"""


@pytest.fixture(autouse=True)
def _importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def header(finish: FinishReason = FinishReason.STOP) -> RolloutHeader:
    return RolloutHeader("g1-0", "g1", "p", 12, 2, 0, 0, finish, 100, 60, 40, 1)


def verdict(kind: VerdictKind = VerdictKind.WRONG_ANSWER) -> Verdict:
    return Verdict(kind, passed=3, total=4, graded=4, duration_s=0.1, backend="fake")


def rewards(name: str, *more: str) -> Rewards:
    rule = f'broker.reward={{rule = "callable", entry_point = "user_rewards:{name}"}}'
    return Rewards(load_config(None, [rule, *more]))


def test_a_users_function_sees_the_rollout_and_the_verdict() -> None:
    assert rewards("shorter_is_better").of(header(), verdict()) == pytest.approx(0.75 - 0.1)
    assert not rewards("shorter_is_better").run_all_tests
    assert rewards("shorter_is_better", "broker.reward.run_all_tests=true").run_all_tests


def test_overlong_rollouts_are_punished_after_a_users_function() -> None:
    punished = rewards("shorter_is_better", "broker.reward.overlong=punished", "broker.reward.punished_reward=-2.0")
    assert punished.of(header(FinishReason.LENGTH), verdict()) == -2.0


@pytest.mark.parametrize("name", ["nothing", "broken"])
def test_a_users_function_that_fails_gives_no_reward_and_says_so(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert rewards(name).of(header(), verdict()) is None
    assert "user's reward" in caplog.text


def test_the_reward_of_an_agent_takes_the_place_of_any_rule() -> None:
    own = replace(header(), own_reward=0.25)
    for of_run in (rewards("broken"), Rewards(load_config(None)), rewards("shorter_is_better")):
        assert of_run.of(own, verdict(VerdictKind.ACCEPTED)) == 0.25
        assert of_run.of(own, verdict(VerdictKind.INTERNAL_ERROR)) is None
    punished = Rewards(load_config(None, ["broker.reward.overlong=punished", "broker.reward.punished_reward=-2.0"]))
    assert punished.of(replace(own, finish_reason=FinishReason.LENGTH), verdict()) == -2.0
    with pytest.raises(ValueError, match="reward nan is not a finite number"):
        replace(own, own_reward=float("nan"))


def test_our_failure_never_reaches_a_users_function() -> None:
    assert rewards("broken").of(header(), verdict(VerdictKind.INTERNAL_ERROR)) is None
    assert Rewards(load_config(None)).of(header(), verdict(VerdictKind.INTERNAL_ERROR)) is None


@pytest.mark.parametrize("name", ["missing", "number"])
def test_a_function_that_is_not_there_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(Unusable, match=rf"user_rewards:{name}"):
        rewards(name)
    with pytest.raises(Unusable, match="no_such_module"):
        Rewards(load_config(None, ['broker.reward={rule = "callable", entry_point = "no_such_module:f"}']))


def test_the_rules_of_the_configuration_reach_the_reward() -> None:
    soft = Rewards(load_config(None, ["broker.reward.rule=soft"]))
    assert soft.run_all_tests
    assert soft.of(header(), verdict()) == 0.75
    late = ["broker.reward.overlong=soft", "broker.reward.buffer_tokens=8", "generation.sampling.max_new_tokens=14"]
    assert Rewards(load_config(None, late)).of(header(), verdict()) == pytest.approx(-1.0 - 0.5)
    assert math.isclose(Rewards(load_config(None)).of(header(), verdict()) or 0.0, -1.0)


def test_a_missing_thinking_part_costs_what_the_configuration_says() -> None:
    penalised = Rewards(load_config(None, ["broker.reward.no_thinking=punished"]))
    assert penalised.of(header(), verdict(VerdictKind.ACCEPTED)) == -0.5
    assert penalised.of(replace(header(), has_thinking=True), verdict(VerdictKind.ACCEPTED)) == 1.0
    user = rewards("shorter_is_better", "broker.reward.no_thinking=punished", "broker.reward.no_thinking_reward=-2")
    assert user.of(header(), verdict()) == -2.0
