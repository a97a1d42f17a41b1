"""The learner's Prometheus metrics. docs/reference/metrics.md lists them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nouscoder.learner.metrics.step import TrainedBatch
from nouscoder.learner.scoring import BatchStatistics
from nouscoder.recorded_evaluations import Figures, RecordedEvaluations

_STALENESS_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)


class WaitReason(StrEnum):
    """What the training thread waits for: the label `for` of `learner_wait_seconds_total`.

    CHECKPOINT and PUBLISH include copying the state and waiting for the previous one. Writing overlaps training.
    """

    BATCH = "batch"
    CHECKPOINT = "checkpoint"
    PUBLISH = "publish"
    PAUSED = "paused"
    EVALUATION = "evaluation"  # of the first policy, before training changes it


class CheckpointOutcome(StrEnum):
    """How an attempt to write a checkpoint ended: the label `outcome` of `learner_checkpoints_total`."""

    WRITTEN = "written"
    FAILED = "failed"


_COMPLETED = "of all groups that became complete while the last batch gathered, filtered ones too."
# Gauges of the last batch, some of which the guards watch (domain/guards.py): name, figure of BatchStatistics, help.
_OF_BATCH = (
    ("reward_mean", "reward_mean", "Mean reward of the last batch."),
    ("pass_rate", "pass_rate", "Share of accepted rollouts in the last batch."),
    ("repetition_ratio", "repetition_share", "Share of the last batch's rollouts that end in a repetition."),
    ("hard_coding_ratio", "hard_coding_share", "Share of the last batch's accepted programs that look hard-coded."),
    (
        "same_programs_ratio",
        "same_programs",
        "Share of a group's programs that repeat another one of the group, in the last batch.",
    ),
    (
        "model_reward_correlation",
        "model_reward_correlation",
        "Correlation of the reward model's scores with verified rewards.",
    ),
    ("all_groups_reward_mean", "all_groups.reward_mean", f"Mean reward {_COMPLETED}"),
    ("all_groups_pass_rate", "all_groups.pass_rate", f"Share of accepted rollouts {_COMPLETED}"),
)
# The same with a label and the figure of each of its values.
_LENGTHS = {"true": "response_length_correct", "false": "response_length_incorrect"}
_SOLVED = {"trained": "pass_at_g", "all": "all_groups.pass_at_g"}
_OF_BATCH_BY_LABEL = (
    ("response_length_tokens", "correct", _LENGTHS, "Mean tokens a rollout of the last batch."),
    ("pass_at_g", "groups", _SOLVED, "Share of groups with an accepted rollout."),
)


def _figure(batch: BatchStatistics, path: str) -> float | None:
    """The figure; None if the batch lacks it."""
    found: Any = batch
    for name in path.split("."):
        found = None if found is None else getattr(found, name)
    return None if found is None else float(found)


class _EvaluationCollector(Collector):
    """The newest evaluation of the run, read at each scrape. Before the first: pass@1 is 0, and the version -1."""

    def __init__(self, evaluations: RecordedEvaluations) -> None:
        self._evaluations = evaluations

    def collect(self) -> Iterator[Metric]:
        none: Figures = {"policy_version": -1, "pass_at_1": 0.0}
        figures = next(reversed(self._evaluations.figures()), none)
        rates = {"1": figures["pass_at_1"], **figures.get("pass_at_k", {})}
        family = GaugeMetricFamily(
            "nouscoder_learner_evaluation_pass_at_k", "pass@k of the newest evaluated policy.", labels=["k"]
        )
        for k, rate in rates.items():
            family.add_metric([k], rate)
        yield family
        yield GaugeMetricFamily(
            "nouscoder_learner_evaluation_standard_error",
            "Standard error of its pass@1.",
            value=figures.get("standard_error", 0.0),
        )
        yield GaugeMetricFamily(
            "nouscoder_learner_evaluation_policy_version",
            "The newest policy version that was evaluated, -1 before the first.",
            value=figures["policy_version"],
        )


class LearnerMetrics:
    """The metrics. Gauges show the last step, or the last batch for figures of a batch.

    Every label value that is known in advance exists from the start, with 0. A missing series therefore means that this
    process was not scraped.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"nouscoder_learner_{name}", text, labels, registry=registry)

        self._steps = Counter("nouscoder_learner_steps", "Optimizer steps done by this process.", registry=registry)
        self._skipped = Counter(
            "nouscoder_learner_skipped_steps", "Steps that changed nothing, see learner/trainer.py.", registry=registry
        )
        self._last_step = gauge("last_step_timestamp_seconds", "Unix time of the last step, or of this start.")
        self._last_step.set(time.time())
        self._policy_version = gauge("policy_version", "Newest policy version that this process knows published.")
        self._policy_version.set(-1)
        self._staleness = Histogram(
            "nouscoder_learner_rollout_staleness_versions",
            "Policy version at consumption minus a rollout's oldest version.",
            buckets=_STALENESS_BUCKETS,
            registry=registry,
        )
        self._figures = [(gauge(name, text), figure) for name, figure, text in _OF_BATCH]
        for name, label, figures, text in _OF_BATCH_BY_LABEL:
            family = gauge(name, text, (label,))
            self._figures += [(family.labels(value), figure) for value, figure in figures.items()]
        self._diagnostic = gauge("diagnostic", "A diagnostic of the last step, named as in metrics.jsonl.", ("name",))
        entropy = gauge("entropy", "Mean entropy of the loss tokens, in nats.")
        ratio = gauge("importance_ratio", "pi_theta / pi_old (mismatch: pi_old / pi_sampler).", ("stat",))
        sample_size = gauge("effective_sample_size", "Share of the loss tokens, in (0, 1].")
        clip_fraction = gauge("clip_fraction", "Share of loss tokens whose gradient the clip took.", ("side",))
        # Diagnostics with their own metric (docs/reference/metrics.md), if the objective reports them.
        self._named = {
            "entropy": entropy,
            "effective_sample_size": sample_size,
            **{f"ratio_{stat}": ratio.labels(stat) for stat in ("mean", "min", "max")},
            **{stat: ratio.labels(stat) for stat in ("mismatch_mean", "mismatch_max")},
            **{f"clip_fraction_{side}": clip_fraction.labels(side) for side in ("low", "high")},
        }
        self._gradient_norm = gauge("gradient_norm", "Norm of the gradient before it is capped.")
        self._tokens_per_second = gauge("tokens_per_second", "Tokens fed a second of training, in the last batch.")
        self._mfu = gauge("mfu", "Model FLOPs used in training, of the device's peak.")
        self._wait = Counter("nouscoder_learner_wait_seconds", "Time not training.", ("for",), registry=registry)
        self._checkpoints = Counter(
            "nouscoder_learner_checkpoints",
            "Checkpoints that became durable, and attempts that failed.",
            ("outcome",),
            registry=registry,
        )
        self._checkpoint_s = gauge("checkpoint_duration_seconds", "From the copy of the state until it was durable.")
        self._registry = registry
        for reason in WaitReason:
            self._wait.labels(reason.value)
        for outcome in CheckpointOutcome:
            self._checkpoints.labels(outcome.value)

    def watch_evaluations(self, evaluations: RecordedEvaluations) -> None:
        """Export the newest of these from now on."""
        self._registry.register(_EvaluationCollector(evaluations))

    def watch_storage(self, folder: Path) -> None:
        """Export the share of `folder`'s file system that is free, 0 once it cannot be read."""

        def free_ratio() -> float:
            try:
                usage = shutil.disk_usage(folder)
            except OSError:
                return 0.0
            return usage.free / usage.total if usage.total else 0.0

        name = "nouscoder_learner_storage_free_ratio"
        Gauge(name, "Free share of the file system of the run's folder.", registry=self._registry).set_function(
            free_ratio
        )

    def waited(self, reason: WaitReason, duration_s: float) -> None:
        """Add seconds of a wait. A long wait is added in parts while it lasts."""
        self._wait.labels(reason.value).inc(duration_s)

    def checkpointed(self, outcome: CheckpointOutcome, duration_s: float) -> None:
        """Count an attempt to write a checkpoint."""
        self._checkpoints.labels(outcome.value).inc()
        if outcome is CheckpointOutcome.WRITTEN:
            self._checkpoint_s.set(duration_s)

    def published(self, policy_version: int) -> None:
        """Show the newest version that the broker knows."""
        self._policy_version.set(policy_version)

    def trained(self, batch: TrainedBatch, flops: float, peak_flops: float) -> None:
        """Show a batch. `flops` are the operations of its steps (operations.py), `peak_flops` those of all devices."""
        self._steps.inc(len(batch.steps))
        self._skipped.inc(sum(step.skipped for step in batch.steps))
        self._last_step.set(time.time())
        for scored in batch.scored:
            self._staleness.observe(scored.staleness)
        for gauge, figure in self._figures:
            if (value := _figure(batch.statistics, figure)) is not None:
                gauge.set(value)
        self._tokens_per_second.set(batch.tokens_per_second)
        self._mfu.set(flops / batch.duration_s / peak_flops)
        self._gradient_norm.set(batch.steps[-1].gradient_norm)
        for name, value in batch.steps[-1].diagnostics.items():
            self._diagnostic.labels(name).set(value)
            if name in self._named:
                self._named[name].set(value)
