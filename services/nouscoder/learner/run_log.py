"""metrics.jsonl, a line a step, and samples.jsonl, a few rollouts a batch.

INVARIANT: after `resume`, each step up to the checkpoint's has exactly one line and no later step has any. Lines are
appended after the commit; those of the last batch also lie in its checkpoint (its log tail), so a crash between the
two loses none.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Protocol

from nouscoder.learner.atomic_files import naming_storage_faults, write_whole
from nouscoder.learner.batch_statistics import ScoredRollout
from nouscoder.learner.trainer import TrainedBatch

Line = dict[str, Any]


class Decoder(Protocol):
    """Makes text of token ids; PolicyTokenizer is one."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text."""
        ...


@dataclass(frozen=True, slots=True)
class LogTail:
    """The lines of the last batch, for metrics.jsonl and samples.jsonl."""

    metrics: list[Line] = field(default_factory=list)
    samples: list[Line] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BatchSeconds:
    """Where the time of a batch went, in seconds."""

    wait_for_batch: float = 0.0
    checkpoint: float = 0.0
    publish: float = 0.0


def metrics_lines(trained: TrainedBatch, policy_version: int, seconds: BatchSeconds) -> list[Line]:
    """A line for each step. `policy_version` is the one the batch makes.

    Rewards, pass rate, staleness and lengths are those of the whole batch; loss, tokens and diagnostics those of the
    step. Of `seconds`, wait_for_batch stands with the batch's first step, and checkpoint and publish with its last,
    so that sums over lines are right; train adds up to the batch's time in training.
    """
    preparation_s = trained.duration_s - sum(step.duration_s for step in trained.steps)
    lines = []
    for index, step in enumerate(trained.steps):
        first, last = index == 0, index == len(trained.steps) - 1
        lines.append(
            {
                "step": step.step,
                "batch_id": trained.batch_id,
                "policy_version": policy_version,
                "loss": step.loss,
                **asdict(trained.statistics),
                **step.diagnostics,
                "gradient_norm": step.gradient_norm,
                "learning_rate": step.learning_rate,
                "tokens": step.num_tokens,
                "tokens_per_second": step.model_tokens / step.duration_s,
                "seconds": {
                    "wait_for_batch": seconds.wait_for_batch if first else 0.0,
                    "train": step.duration_s + (preparation_s if first else 0.0),
                    "checkpoint": seconds.checkpoint if last else 0.0,
                    "publish": seconds.publish if last else 0.0,
                },
                "time": time.time(),
            }
        )
    return lines


def with_seconds(tail: LogTail, seconds: BatchSeconds) -> LogTail:
    """The tail with what is known only after the checkpoint: its time and that of publication, at the last step."""
    if not tail.metrics:
        return tail
    last = dict(tail.metrics[-1])
    last["seconds"] = {**last["seconds"], "checkpoint": seconds.checkpoint, "publish": seconds.publish}
    return replace(tail, metrics=[*tail.metrics[:-1], last])


def sample_lines(trained: TrainedBatch, tokenizer: Decoder, count: int, seed: int) -> list[Line]:
    """`count` rollouts of the batch, drawn by the seed and the batch; `version_range` is [oldest, newest]."""
    random = Random(f"{seed}/samples/{trained.batch_id}")
    chosen = random.sample(trained.scored, min(count, len(trained.scored)))
    return [_sample_line(trained.steps[-1].step, scored, tokenizer) for scored in chosen]


def _sample_line(step: int, scored: ScoredRollout, tokenizer: Decoder) -> Line:
    rollout = scored.graded.rollout
    return {
        "step": step,
        "rollout_id": rollout.rollout_id,
        "problem_id": rollout.problem_id,
        "prompt": tokenizer.decode(rollout.prompt_token_ids),
        "program": rollout.text,
        "verdict": scored.graded.verdict.kind.value,
        "reward": scored.reward,
        "advantage": scored.advantage,
        "version_range": [rollout.oldest_version, rollout.newest_version],
        "staleness": scored.staleness,
        "finish_reason": rollout.finish_reason.value,
    }


class RunLog:
    """Both files, in the run folder."""

    def __init__(self, folder: Path) -> None:
        self._metrics = folder / "metrics.jsonl"
        self._samples = folder / "samples.jsonl"

    def resume(self, step: int, tail: LogTail) -> None:
        """Cut both files back to `step`, the checkpoint's, and put in what its tail has and they lack."""
        missing = {line["step"]: line for line in tail.metrics}
        _rewrite(self._metrics, lambda line: line["step"] <= step, missing)
        # A batch's samples all carry the number of its last step, so they are complete or replaced as one.
        _rewrite(self._samples, lambda line: line["step"] < step, {})
        _append(self._samples, tail.samples)

    def append(self, tail: LogTail) -> None:
        """Add the lines of a batch. Raises StorageError."""
        _append(self._metrics, tail.metrics)
        _append(self._samples, tail.samples)


def _rewrite(file: Path, is_kept: Callable[[Line], bool], missing: dict[int, Line]) -> None:
    kept: list[Line] = []
    for text in file.read_text(encoding="utf8").split("\n") if file.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue  # torn by a crash in the middle of a write
        if is_kept(line):
            kept.append(line)
            missing = {step: other for step, other in missing.items() if step != line["step"]}
    write_whole(file, "".join(_text(line) for line in [*kept, *missing.values()]).encode())


def _append(file: Path, lines: Iterable[Line]) -> None:
    with naming_storage_faults(file), file.open("a", encoding="utf8") as output:
        output.write("".join(_text(line) for line in lines))
        output.flush()
        os.fsync(output.fileno())


def _text(line: Line) -> str:
    return json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"
