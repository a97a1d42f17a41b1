"""The arrays of a rollout agree, and run-length encoding keeps the versions."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.domain.rollout import Rollout, Sampling, Task, assemble_rollout
from nouscoder.domain.staleness import staleness_of
from nouscoder.domain.tokens import Completion, FinishReason, Segment, VersionSpan, float32, int32, spans_of


def rollout(versions: list[int]) -> Rollout:
    count = len(versions)
    return Rollout(
        rollout_id="r",
        group_id="g",
        problem_id="p",
        segments=(Segment(1, False), Segment(count, True)),
        token_ids=int32([1] + [5] * count),
        logprobs=float32([-0.5] * count),
        versions=spans_of(versions),
        finish_reason=FinishReason.STOP,
        sampling=Sampling(),
        text="",
    )


some_versions = st.lists(st.integers(0, 9), min_size=1, max_size=30)


@given(some_versions)
def test_spans_decode_to_the_versions_and_neighbours_differ(versions: list[int]) -> None:
    spans = spans_of(versions)
    assert [span.policy_version for span in spans for _ in range(span.num_tokens)] == versions
    assert all(a.policy_version != b.policy_version for a, b in pairwise(spans))


@given(some_versions, st.integers(0, 5))
def test_staleness_counts_from_the_oldest_token(versions: list[int], ahead: int) -> None:
    newest = max(versions) + ahead
    assert staleness_of(rollout(versions), newest) == newest - min(versions) >= 0


@given(some_versions)
def test_a_rollout_newer_than_the_policy_raises(versions: list[int]) -> None:
    with pytest.raises(ValueError, match="newer than the newest known"):
        staleness_of(rollout(versions), max(versions) - 1)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"segments": (Segment(3, False),)}, "no sampled tokens"),
        ({"segments": (Segment(3, True),)}, "no prompt"),
        ({"segments": (Segment(1, False), Segment(0, False), Segment(2, True))}, "a segment is empty"),
        ({"segments": (Segment(2, False), Segment(2, True))}, "segments do not cover"),
        ({"logprobs": float32([-0.5])}, "1 log-probabilities for 2 sampled tokens"),
        ({"versions": (VersionSpan(0, 1),)}, "do not cover"),
        ({"versions": (VersionSpan(0, 2), VersionSpan(1, 0))}, "empty"),
        ({"logprobs": float32([-0.5, float("nan")])}, "log-probability"),
        ({"logprobs": float32([-0.5, float("-inf")])}, "log-probability"),
        ({"logprobs": float32([-0.5, 0.5])}, "log-probability"),
    ],
)
def test_arrays_that_disagree_raise(change: dict[str, object], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        replace(rollout([0, 0]), **change)  # type: ignore[arg-type]


@given(some_versions)
def test_oldest_and_newest_version(versions: list[int]) -> None:
    made = rollout(versions)
    assert (made.oldest_version, made.newest_version) == (min(versions), max(versions))


def test_the_sampled_arrays_of_several_turns_exclude_given_tokens() -> None:
    first = Completion(int32([5, 6]), float32([-0.5, -0.25]), spans_of([3, 3]), FinishReason.STOP)
    second = Completion(int32([8]), float32([-1.0]), spans_of([3]), FinishReason.LENGTH)
    made = assemble_rollout(Task("r", "g", "p", "", Sampling()), [int32([1, 2]), first, int32([7]), second], "t")
    assert made.segments == (Segment(2, False), Segment(2, True), Segment(1, False), Segment(1, True))
    assert made.token_ids.tolist() == [1, 2, 5, 6, 7, 8]
    assert (made.prompt_token_ids.tolist(), made.sampled_token_ids.tolist()) == ([1, 2], [5, 6, 8])
    assert made.logprobs.tolist() == [-0.5, -0.25, -1.0]
    assert made.versions == (VersionSpan(3, 3),)
    assert made.is_overlong


def test_a_rollout_needs_a_completion() -> None:
    with pytest.raises(ValueError, match="no sampled tokens"):
        assemble_rollout(Task("r", "g", "p", "", Sampling()), [int32([1, 2])], "t")
