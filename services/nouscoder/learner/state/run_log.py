"""The logs of a training: metrics.jsonl, samples.jsonl and rewards.jsonl.

metrics.jsonl has one line for each step, samples.jsonl a few rollouts of each batch, rewards.jsonl one line for each
batch, with the rewards of all its rollouts. An evaluation that was recorded since the line before is the field
`evaluation` of a step's line; its `policy_version` says which policy it is of.

INVARIANT: each trained step has exactly one line in metrics.jsonl, in order of steps. The lines of a batch are durable
before the batch is committed and before a checkpoint includes it. A batch that is trained again adds only missing
lines.

INVARIANT: an evaluation is in one line of metrics.jsonl at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nouscoder.learner.metrics.step import TrainedBatch
from nouscoder.learner.scoring import ScoredRollout, inspected
from nouscoder.learner.state.line_file import Line, LineFile
from nouscoder.recorded_evaluations import RecordedEvaluations

Decode = Callable[[Sequence[int]], str]  # token ids -> text


@dataclass(frozen=True, slots=True)
class BatchLines:
    """The lines of a batch, for metrics.jsonl, samples.jsonl and rewards.jsonl."""

    metrics: list[Line] = field(default_factory=list)
    samples: list[Line] = field(default_factory=list)
    rewards: list[Line] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BatchSeconds:
    """The waiting times of the training thread between the previous batch and this one, in seconds."""

    wait_for_batch: float = 0.0
    checkpoint: float = 0.0
    publish: float = 0.0


def metrics_lines(trained: TrainedBatch, policy_version: int, seconds: BatchSeconds) -> list[Line]:
    """One line per step. `policy_version` is the version that the batch makes.

    Rewards, pass rate, staleness and lengths are those of the whole batch; loss, tokens and diagnostics are those of
    the step, which may have replayed rollouts as well. Only the line of the first step has `seconds`. The `train` times
    add up to the batch's training time.

    Raises ValueError when a diagnostic has the name of another field.
    """
    preparation_s = trained.duration_s - sum(step.duration_s for step in trained.steps)
    lines = []
    for index, step in enumerate(trained.steps):
        is_first = index == 0
        before = seconds if is_first else BatchSeconds()
        line = {
            "step": step.step,
            "batch_id": trained.batch_id,
            "policy_version": policy_version,
            "replayed_rollouts": trained.num_replayed,
            "loss": step.loss,
            "skipped": step.skipped,
            **asdict(trained.statistics),
            "gradient_norm": step.gradient_norm,
            "learning_rate": step.learning_rate,
            "tokens": step.num_tokens,
            "tokens_per_second": step.model_tokens / step.duration_s,
            "seconds": {**asdict(before), "train": step.duration_s + (preparation_s if is_first else 0.0)},
            "time": time.time(),
        }
        if clash := sorted(line.keys() & step.diagnostics.keys()):
            raise ValueError(f"a diagnostic must not be named {clash[0]!r}: a line has that field already")
        lines.append({**line, **step.diagnostics})
    return lines


def sample_lines(trained: TrainedBatch, decode: Decode, count: int, seed: int) -> list[Line]:
    """`count` rollouts of the batch, chosen by the seed and the batch. `version_range` is [oldest, newest]."""
    chosen = inspected(trained.scored, trained.batch_id, count, seed)
    return [_sample_line(trained.steps[-1].step, scored, decode) for scored in chosen]


def _sample_line(step: int, scored: ScoredRollout, decode: Decode) -> Line:
    rollout = scored.graded.rollout
    return {
        "step": step,
        "rollout_id": rollout.rollout_id,
        "problem_id": rollout.problem_id,
        "prompt": decode(rollout.prompt_token_ids),
        "program": rollout.text,
        "verdict": scored.graded.verdict.kind.value,
        "reward": scored.graded.reward,
        "advantage": scored.advantage,
        "version_range": [rollout.oldest_version, rollout.newest_version],
        "staleness": scored.staleness,
        "finish_reason": rollout.finish_reason.value,
    }


def reward_line(trained: TrainedBatch) -> Line:
    """The rewards of all rollouts of the batch, by problem. `step` is the last step of the batch."""
    rewards: dict[str, list[float]] = {}
    for scored in trained.scored:
        rewards.setdefault(scored.graded.rollout.problem_id, []).append(scored.graded.reward)
    return {"step": trained.steps[-1].step, "batch_id": trained.batch_id, "rewards": rewards}


class RunLog:
    """The three files, in the run folder."""

    def __init__(self, folder: Path) -> None:
        self._metrics = LineFile(folder / "metrics.jsonl", lambda line: line["step"])
        self._samples = LineFile(folder / "samples.jsonl", lambda line: (line["step"], line["rollout_id"]))
        self._rewards = LineFile(folder / "rewards.jsonl", lambda line: line["batch_id"])
        self._evaluations = RecordedEvaluations(folder)
        self._evaluated: set[int] = set()  # the policy versions whose evaluation has a line

    def open(self, last_step: int) -> None:
        """Read the files. Remove incomplete lines and lines after `last_step`, the last step that can be replayed."""
        lines = self._metrics.open(last_step)
        self._evaluated = {line["evaluation"]["policy_version"] for line in lines if "evaluation" in line}
        self._samples.open(last_step)
        self._rewards.open(last_step)

    def has_step(self, step: int) -> bool:
        """Whether the line of this step is there."""
        return self._metrics.knows(step)

    def append(self, lines: BatchLines) -> None:
        """Add the missing lines of a batch, with the evaluations that have no line yet. Raises StorageError."""
        missing = [line for line in lines.metrics if not self.has_step(line["step"])]
        due = [each for each in self._evaluations.figures() if each["policy_version"] not in self._evaluated]
        for line, figures in zip(missing, due, strict=False):
            line["evaluation"] = figures
            self._evaluated.add(figures["policy_version"])
        self._metrics.append(missing)
        self._samples.append(lines.samples)
        self._rewards.append(lines.rewards)
