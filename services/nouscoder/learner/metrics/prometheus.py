"""The learner's Prometheus metrics (design.md section 8)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nouscoder.learner.metrics.step import BatchStatistics, TrainedBatch
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


class _GuardMetrics:
    """What the guards watch (domain/guards.py), of the last batch. A figure that a batch lacks keeps its value."""

    def __init__(self, gauge: Callable[..., Gauge]) -> None:
        self._repetition = gauge("repetition_ratio", "Share of the last batch's rollouts that end in a repetition.")
        self._hard_coding = gauge(
            "hard_coding_ratio", "Share of the last batch's accepted programs that look hard-coded."
        )
        self._same_programs = gauge(
            "same_programs_ratio",
            "Share of a group's programs that repeat another one of the group, in the last batch.",
        )
        self._agreement = gauge(
            "model_reward_correlation",
            "Correlation of the reward model's scores with verified rewards.",
        )
        self._length = gauge("response_length_tokens", "Mean tokens a rollout of the last batch.", ("correct",))
        for correct in ("true", "false"):
            self._length.labels(correct)

    def show(self, figures: BatchStatistics) -> None:
        """Show a batch."""
        shown = (
            (self._repetition, figures.repetition_share),
            (self._hard_coding, figures.hard_coding_share),
            (self._same_programs, figures.same_programs),
            (self._agreement, figures.model_reward_correlation),
            (self._length.labels("true"), figures.response_length_correct),
            (self._length.labels("false"), figures.response_length_incorrect),
        )
        for gauge, value in shown:
            if value is not None:
                gauge.set(value)


class _GroupMetrics:
    """The figures of all groups beside those of the trained ones, and pass@G, of the last batch."""

    def __init__(self, gauge: Callable[..., Gauge]) -> None:
        completed = "of all groups that became complete while the last batch gathered, filtered ones too."
        self._reward_mean = gauge("all_groups_reward_mean", f"Mean reward {completed}")
        self._pass_rate = gauge("all_groups_pass_rate", f"Share of accepted rollouts {completed}")
        self._solved = gauge("pass_at_g", "Share of groups with an accepted rollout.", ("groups",))
        for groups in ("trained", "all"):
            self._solved.labels(groups)

    def show(self, figures: BatchStatistics) -> None:
        """Show a batch."""
        self._solved.labels("trained").set(figures.pass_at_g)
        if figures.all_groups is not None:
            self._reward_mean.set(figures.all_groups.reward_mean)
            self._pass_rate.set(figures.all_groups.pass_rate)
            self._solved.labels("all").set(figures.all_groups.pass_at_g)


class _EvaluationCollector(Collector):
    """The newest evaluation of the run, read at each scrape. Before the first: pass@1 is 0, and the version -1."""

    def __init__(self, evaluations: RecordedEvaluations) -> None:
        self._evaluations = evaluations

    def collect(self) -> Iterator[Metric]:
        """The metrics at one instant."""
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
        self._reward_mean = gauge("reward_mean", "Mean reward of the last batch.")
        self._pass_rate = gauge("pass_rate", "Share of accepted rollouts in the last batch.")
        self._diagnostic = gauge("diagnostic", "A diagnostic of the last step, named as in metrics.jsonl.", ("name",))
        entropy = gauge("entropy", "Mean entropy of the loss tokens, in nats.")
        ratio = gauge("importance_ratio", "pi_theta / pi_old (mismatch: pi_old / pi_sampler).", ("stat",))
        sample_size = gauge("effective_sample_size", "Share of the loss tokens, in (0, 1].")
        clip_fraction = gauge("clip_fraction", "Share of loss tokens whose gradient the clip took.", ("side",))
        # Diagnostics with their own metric (design.md section 8), if the objective reports them.
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
        self._guarded = _GuardMetrics(gauge)
        self._groups = _GroupMetrics(gauge)
        self._registry = registry
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        for reason in WaitReason:
            self._wait.labels(reason.value)
        for outcome in CheckpointOutcome:
            self._checkpoints.labels(outcome.value)

    def watch_evaluations(self, evaluations: RecordedEvaluations) -> None:
        """Export the newest of these from now on."""
        self._registry.register(_EvaluationCollector(evaluations))

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
        """Show a batch. `flops` are the operations of its steps (balance.py), `peak_flops` those of all devices."""
        self._steps.inc(len(batch.steps))
        self._skipped.inc(sum(step.skipped for step in batch.steps))
        self._last_step.set(time.time())
        for scored in batch.scored:
            self._staleness.observe(scored.staleness)
        figures = batch.statistics
        self._reward_mean.set(figures.reward_mean)
        self._pass_rate.set(figures.pass_rate)
        self._guarded.show(figures)
        self._groups.show(figures)
        self._tokens_per_second.set(batch.tokens_per_second)
        self._mfu.set(flops / batch.duration_s / peak_flops)
        self._gradient_norm.set(batch.steps[-1].gradient_norm)
        for name, value in batch.steps[-1].diagnostics.items():
            self._diagnostic.labels(name).set(value)
            if name in self._named:
                self._named[name].set(value)
