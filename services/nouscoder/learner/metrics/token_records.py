"""Files for the viewer of rollouts: tokens/00000012.json has the tokens of a few rollouts of batch 12.

INVARIANT: a file appears complete, and its contents depend only on the training of its batch. At most `_NEWEST` +
`_OLDER` files are kept: the newest ones, and older ones at even distances over the run. A rollout has at most
`_MAX_TOKENS` tokens in its file, the first and the last ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from nouscoder.atomic_files import numbered, remove, write_whole
from nouscoder.domain.rollout import Rollout
from nouscoder.learner.metrics.step import TokenTrace, TrainedBatch
from nouscoder.learner.scoring import ScoredRollout
from nouscoder.policy_folder.tokenizer import PolicyTokenizer

_NEWEST, _OLDER = 16, 16

_MAX_TOKENS = 4096

_MAX_PROMPT = 4000  # characters


class TokenRecords:
    """The folder tokens/ of a run."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "tokens"

    def write(self, trained: TrainedBatch, policy_version: int, tokenizer: PolicyTokenizer) -> None:
        """Write the file of a batch, and remove files that are too many. Raises StorageError."""
        rollouts = [
            _record(scored, trace, tokenizer)
            for scored in trained.scored
            if (trace := trained.traces.get(scored.graded.rollout.rollout_id)) is not None
        ]
        if not rollouts:
            return
        record = {"batch_id": trained.batch_id, "policy_version": policy_version, "rollouts": rollouts}
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
        write_whole(self._folder / f"{trained.batch_id:08d}.json", text.encode("utf8", "backslashreplace"))
        there = numbered(self._folder, ".json")
        for number in there.keys() - kept(list(there)):
            remove(there[number])


def kept(numbers: Sequence[int]) -> set[int]:
    """Of ascending batch numbers, those whose files are kept."""
    older, newest = numbers[:-_NEWEST], numbers[-_NEWEST:]
    distance = 1
    while older and older[-1] // distance >= _OLDER:
        distance *= 2
    return {*newest, *(number for number in older if number % distance == 0)}


def _record(scored: ScoredRollout, trace: TokenTrace, tokenizer: PolicyTokenizer) -> dict[str, Any]:
    rollout = scored.graded.rollout
    shown = _shown(rollout.num_sampled_tokens)
    ids, versions = rollout.sampled_token_ids, _versions(rollout)
    return {
        "rollout_id": rollout.rollout_id,
        "problem_id": rollout.problem_id,
        "step": trace.step,
        "verdict": scored.graded.verdict.kind.value,
        "reward": scored.graded.reward,
        "advantage": scored.advantage,
        "staleness": scored.staleness,
        "length": rollout.num_sampled_tokens,
        "overlong": rollout.is_overlong,
        "prompt": tokenizer.decode(rollout.prompt_token_ids)[-_MAX_PROMPT:],
        "left_out": rollout.num_sampled_tokens - len(shown),
        "tokens": tokenizer.pieces([ids[at] for at in shown]),
        "versions": [versions[at] for at in shown],
        "ratios": [round(trace.ratios[at], 4) for at in shown],
        "mismatches": [round(trace.mismatches[at], 4) for at in shown],
        "clipped": [int(trace.clipped[at]) for at in shown],
    }


def _shown(length: int) -> list[int]:
    """The positions of the tokens that are written."""
    half = _MAX_TOKENS // 2
    return [*range(length)] if length <= _MAX_TOKENS else [*range(half), *range(length - half, length)]


def _versions(rollout: Rollout) -> list[int]:
    return [*chain.from_iterable([span.policy_version] * span.num_tokens for span in rollout.versions)]
