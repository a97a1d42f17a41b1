"""Examples as rollouts.

An example becomes a rollout that somebody else has sampled, which the learner's trainer takes. A rollout has segments,
given or sampled, and only sampled ones are in the loss. Nobody knows the log-probabilities with which an example was
written; they are 0 here, and the objective of supervised fine-tuning does not read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nouscoder.domain.batch import Batch, GradedRollout
from nouscoder.domain.rollout import Rollout, Sampling
from nouscoder.domain.tokens import Completion, FinishReason, Segment, VersionSpan, concatenated, int32
from nouscoder.domain.verdict import Verdict, VerdictKind

_WRITTEN = Verdict(kind=VerdictKind.ACCEPTED, passed=0, total=0, graded=0, duration_s=0.0, backend="example")

# Token ids, and whether they are in the loss.
Part = tuple[Sequence[int], bool]


def rollout_of(parts: Sequence[Part], problem_id: str = "") -> Rollout:
    """An example from its parts; the first is the prompt. Raises ValueError for an empty part or one without loss."""
    num_sampled = sum(len(ids) for ids, in_loss in parts if in_loss)
    return Rollout(
        rollout_id="",
        group_id="",
        problem_id=problem_id,
        segments=tuple(Segment(len(ids), in_loss) for ids, in_loss in parts),
        token_ids=concatenated(int32(ids) for ids, _ in parts),
        logprobs=_unknown_logprobs(num_sampled),
        versions=(VersionSpan(0, num_sampled),),
        finish_reason=FinishReason.STOP,
        sampling=Sampling(),
        text="",
    )


def written(answer: Sequence[int]) -> Completion:
    """An answer [tokens] that ends with its end token, as if it had been sampled."""
    size = len(answer)
    return Completion(int32(answer), _unknown_logprobs(size), (VersionSpan(0, size),), FinishReason.STOP)


def demonstration(prompt: Sequence[int], answer: Sequence[int]) -> Rollout:
    """An example of one turn, from the token ids of its prompt and its answer. Only the answer is in the loss."""
    return rollout_of([(prompt, False), (answer, True)])


def again(rollout: Rollout) -> Rollout:
    """A rollout of a run as an example: the same tokens and segments, scored at temperature 1."""
    return replace(rollout, finish_reason=FinishReason.STOP, sampling=Sampling(), text="", experts=None)


def batch_of(number: int, examples: Sequence[Rollout]) -> Batch:
    """The examples of one step. Each is a group of its own."""
    rollouts = (
        replace(example, rollout_id=f"g{place:06d}-0", group_id=f"g{place:06d}")
        for place, example in enumerate(examples)
    )
    # Rollouts of a run have versions of that run; here each is as old as the policy.
    newest = max(example.newest_version for example in examples)
    return Batch(number, tuple(GradedRollout(rollout, _WRITTEN, 1.0) for rollout in rollouts), newest)


def _unknown_logprobs(num_tokens: int) -> memoryview[float]:
    return memoryview(bytes(4 * num_tokens)).cast("f")
