"""A rollout's arrays agree, and versions survive run-length encoding."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.domain.rollout import FinishReason, Rollout, VersionSpan, spans_of
from nouscoder.domain.staleness import staleness_of


def rollout(versions: list[int]) -> Rollout:
    count = len(versions)
    return Rollout(
        rollout_id="r",
        group_id="g",
        problem_id="p",
        prompt_token_ids=(1,),
        token_ids=(5,) * count,
        logprobs=(-0.5,) * count,
        loss_mask=(True,) * count,
        versions=spans_of(versions),
        finish_reason=FinishReason.STOP,
        text="",
    )


some_versions = st.lists(st.integers(0, 9), min_size=1, max_size=30)


@given(some_versions)
def test_spans_unfold_to_the_versions_and_never_repeat(versions: list[int]) -> None:
    spans = spans_of(versions)
    assert [span.policy_version for span in spans for _ in range(span.num_tokens)] == versions
    assert all(a.policy_version != b.policy_version for a, b in pairwise(spans))


@given(some_versions, st.integers(0, 5))
def test_staleness_counts_from_the_oldest_token(versions: list[int], ahead: int) -> None:
    newest = max(versions) + ahead
    assert staleness_of(rollout(versions), newest) == newest - min(versions) >= 0


@given(some_versions)
def test_a_rollout_from_the_future_raises(versions: list[int]) -> None:
    with pytest.raises(ValueError, match="newer than the newest known"):
        staleness_of(rollout(versions), max(versions) - 1)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"token_ids": (), "logprobs": (), "loss_mask": (), "versions": ()}, "no tokens"),
        ({"logprobs": (-0.5,)}, "differ in length"),
        ({"loss_mask": (True,)}, "differ in length"),
        ({"versions": (VersionSpan(0, 1),)}, "do not cover"),
        ({"versions": (VersionSpan(0, 2), VersionSpan(1, 0))}, "empty"),
        ({"logprobs": (-0.5, float("nan"))}, "log-probability"),
        ({"logprobs": (-0.5, float("-inf"))}, "log-probability"),
        ({"logprobs": (-0.5, 0.5)}, "log-probability"),
    ],
)
def test_arrays_that_disagree_raise(change: dict[str, object], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        replace(rollout([0, 0]), **change)  # type: ignore[arg-type]


@given(some_versions)
def test_oldest_and_newest_version(versions: list[int]) -> None:
    made = rollout(versions)
    assert (made.oldest_version, made.newest_version) == (min(versions), max(versions))
