"""A wait, a failure and a figure have their series before they first happen, so no panel is empty for want of them."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry

from nouscoder.broker.metrics import BrokerCollector
from nouscoder.generation.metrics import GenerationMetrics, IdleReason
from nouscoder.learner.metrics import LearnerMetrics, WaitReason
from nouscoder.ledger import IN_FLIGHT, Ledger, RolloutState
from nouscoder.run_status import RunStatus, StreamStatus
from nouscoder.verdict import VerdictKind
from nouscoder.verifier.metrics import FailureCause, VerifierMetrics

# design.md section 8, without the prefix: what others' scripts read, so it does not change.
_PROMISED = """
verifier_submissions_total{verdict} verifier_tests_total{outcome} verifier_submission_duration_seconds
verifier_test_duration_seconds verifier_queue_depth verifier_sandboxes{state} verifier_cache_hits_total
verifier_internal_errors_total{cause}
broker_ledger_rollouts{state} broker_stream_lag{stream} broker_pending_leases{stream} broker_dead_letters_total{stream}
broker_redeliveries_total{stream} broker_admission_slots_free broker_policy_version
generation_tokens_total generation_running_rollouts generation_policy_version generation_policy_update_seconds
generation_idle_seconds_total{reason}
learner_steps_total learner_rollout_staleness_versions learner_reward_mean learner_pass_rate learner_entropy
learner_importance_ratio{stat} learner_effective_sample_size learner_clip_fraction{side} learner_gradient_norm
learner_tokens_per_second learner_mfu learner_wait_seconds_total{for} learner_response_length_tokens{correct}
"""
STREAMS = ("tasks", "grading", "batches")


def fresh_registries() -> list[CollectorRegistry]:
    """What the four services export before anything has happened; the broker's run is an empty one."""
    verifier, learner, broker = CollectorRegistry(), CollectorRegistry(), CollectorRegistry()
    VerifierMetrics(verifier)
    LearnerMetrics(learner)
    collector = BrokerCollector()
    empty = Ledger(0, 0, 0, 0, 0, {state.value: 0 for state in IN_FLIGHT})
    streams = tuple(StreamStatus(stream, 0, 0, 0, 0) for stream in STREAMS)
    collector.latest = RunStatus("run", empty, streams, None, 0, 0, 192, False, 0, 0)
    broker.register(collector)
    return [verifier, learner, broker, GenerationMetrics().registry]


def samples(registries: Iterable[CollectorRegistry]) -> dict[str, list[dict[str, str]]]:
    """The labels of each series, by name of the sample."""
    found: dict[str, list[dict[str, str]]] = {}
    for registry in registries:
        for family in registry.collect():
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample.labels)
    return found


@pytest.mark.parametrize("promised", _PROMISED.split())
def test_a_promised_metric_is_exported_before_anything_happened(promised: str) -> None:
    name, _, label = promised.rstrip("}").partition("{")
    found = samples(fresh_registries())
    series = found.get(f"nouscoder_{name}") or found.get(f"nouscoder_{name}_bucket")
    assert series is not None
    assert not label or all(label in labels for labels in series)


@pytest.mark.parametrize(
    ("name", "label", "values"),
    [
        ("verifier_submissions_total", "verdict", {kind.value for kind in VerdictKind}),
        (
            "verifier_tests_total",
            "outcome",
            {kind.value for kind in VerdictKind} - {VerdictKind.NO_CODE.value, VerdictKind.COMPILE_ERROR.value},
        ),
        ("verifier_internal_errors_total", "cause", {cause.value for cause in FailureCause}),
        ("broker_ledger_rollouts", "state", {"admitted", *(state.value for state in RolloutState)}),
        ("broker_dead_letters_total", "stream", set(STREAMS)),
        ("broker_redeliveries_total", "stream", set(STREAMS)),
        ("generation_idle_seconds_total", "reason", {reason.value for reason in IdleReason}),
        ("learner_wait_seconds_total", "for", {reason.value for reason in WaitReason}),
        ("learner_clip_fraction", "side", {"low", "high"}),
        ("learner_response_length_tokens", "correct", {"true", "false"}),
        ("learner_importance_ratio", "stat", {"mean", "min", "max", "mismatch_mean", "mismatch_max"}),
    ],
)
def test_every_value_of_a_label_is_there_at_zero(name: str, label: str, values: set[str]) -> None:
    assert {labels[label] for labels in samples(fresh_registries())[f"nouscoder_{name}"]} == values


def test_the_promised_names_are_those_of_the_code_and_each_of_ours_has_the_prefix() -> None:
    found = {
        name for name in samples(fresh_registries()) if not name.endswith(("_created", "_bucket", "_sum", "_count"))
    }
    assert found
    assert [
        name for name in found if not re.fullmatch(r"nouscoder_(verifier|broker|generation|learner)_[a-z_]+", name)
    ] == []
