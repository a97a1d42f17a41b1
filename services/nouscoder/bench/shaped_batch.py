"""Batches of random tokens whose rollouts have given lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nouscoder.domain.batch import Batch, GradedRollout
from nouscoder.domain.rollout import Sampling, Task, assemble_rollout
from nouscoder.domain.tokens import Completion, FinishReason, float32, int32, spans_of
from nouscoder.domain.verdict import Verdict, VerdictKind

_PROMPT_SHARE = 16
_LONGEST_PROMPT = 512


def shaped_batch(vocabulary: int, inputs: Sequence[int]) -> Batch:
    """One group, whose rollouts have these numbers of input tokens; every second one is right.

    A prompt is a sixteenth of its rollout, at most 512 tokens. The recorded log-probabilities are those of a policy
    that knows nothing.
    """
    random = np.random.default_rng(0)
    graded = []
    for number, length in enumerate(inputs):
        num_prompt = min(max(1, length // _PROMPT_SHARE), _LONGEST_PROMPT)
        # The last token is no input.
        tokens = random.integers(0, vocabulary, length + 1).tolist()
        num_sampled = length + 1 - num_prompt
        completion = Completion(
            token_ids=int32(tokens[num_prompt:]),
            logprobs=float32([-float(np.log(vocabulary))] * num_sampled),
            versions=spans_of([0] * num_sampled),
            finish_reason=FinishReason.STOP,
        )
        task = Task(f"r{number}", "g000000", "problem", "", Sampling())
        rollout = assemble_rollout(task, [int32(tokens[:num_prompt]), completion], "")
        kind = VerdictKind.WRONG_ANSWER if number % 2 else VerdictKind.ACCEPTED
        passed = 1 - number % 2
        verdict = Verdict(kind=kind, passed=passed, total=1, graded=1, duration_s=0.01, backend="synthetic")
        graded.append(GradedRollout(rollout, verdict, 1.0 if passed else -1.0))
    return Batch(0, tuple(graded), 0)
