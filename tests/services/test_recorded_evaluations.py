"""Evaluations of a run in metrics.jsonl, in sinks and in Prometheus: each once, with its policy version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from nouscoder.learner.metrics.prometheus import LearnerMetrics
from nouscoder.learner.state.run_log import BatchLines, RunLog
from nouscoder.recorded_evaluations import RecordedEvaluations
from nouscoder.run.evaluation_files import log_evaluations
from nouscoder.run.sinks.follower import STATUS, Follower


def record(run: Path, version: int, rate: float, name: str = "") -> None:
    """Write an evaluation as run/evaluation.py does."""
    file = run / (name or f"evaluations/{version:08d}.json")
    file.parent.mkdir(exist_ok=True)
    found = {"policy_version": version, "pass_at_1": rate, "standard_error": 0.02, "pass_at_k": {"1": rate, "8": 0.9}}
    file.write_text(json.dumps({**found, "by_family": {"a": rate}, "samples": [{"program": "x"}]}))


def figures(version: int, rate: float) -> dict[str, Any]:
    return {
        "policy_version": version,
        "pass_at_1": rate,
        "standard_error": 0.02,
        "pass_at_k": {"1": rate, "8": 0.9},
    }


def lines(batch: int) -> BatchLines:
    """The lines of a batch of two steps."""
    steps = (2 * batch + 1, 2 * batch + 2)
    return BatchLines([{"step": step, "batch_id": batch, "policy_version": batch + 1} for step in steps])


def logged(run: Path) -> dict[int, Any]:
    """The evaluation of each line of metrics.jsonl that has one, by step. Every step has one line."""
    found = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in found] == [*range(1, len(found) + 1)]
    return {line["step"]: line["evaluation"] for line in found if "evaluation" in line}


def test_the_line_after_an_evaluation_has_its_figures_also_after_a_restart_and_a_replay(tmp_path: Path) -> None:
    record(tmp_path, 0, 0.25, "evaluation_before.json")
    log = RunLog(tmp_path)
    log.open(0)
    log.append(lines(0))
    log.append(lines(1))
    record(tmp_path, 2, 0.5)
    log.append(lines(2))
    assert logged(tmp_path) == {1: figures(0, 0.25), 5: figures(2, 0.5)}
    # A restarted learner replays batch 2: its lines are there, and nothing is logged twice.
    log = RunLog(tmp_path)
    log.open(6)
    log.append(lines(2))
    log.append(lines(3))
    assert logged(tmp_path) == {1: figures(0, 0.25), 5: figures(2, 0.5)}
    # A restart that drops the lines of batches 2 and 3 logs the evaluation again.
    log = RunLog(tmp_path)
    log.open(4)
    log.append(lines(2))
    assert logged(tmp_path) == {1: figures(0, 0.25), 5: figures(2, 0.5)}


def test_two_evaluations_at_once_get_a_line_each_and_a_damaged_file_none(tmp_path: Path) -> None:
    record(tmp_path, 0, 0.25, "evaluation_before.json")
    record(tmp_path, 1, 0.5)
    (tmp_path / "evaluations" / "00000002.json").write_text("{")
    (tmp_path / "evaluations" / "00000003.json").write_text("{}")
    log = RunLog(tmp_path)
    log.open(0)
    log.append(lines(0))
    assert logged(tmp_path) == {1: figures(0, 0.25), 2: figures(1, 0.5)}


def test_at_the_end_every_evaluation_is_in_the_log_and_each_step_still_has_one_line(tmp_path: Path) -> None:
    record(tmp_path, 0, 0.25, "evaluation_before.json")
    log = RunLog(tmp_path)
    log.open(0)
    for batch in range(3):
        log.append(lines(batch))
    record(tmp_path, 2, 0.5)
    record(tmp_path, 3, 0.75, "evaluation_after.json")
    for _ in range(2):
        log_evaluations(tmp_path)
        assert logged(tmp_path) == {1: figures(0, 0.25), 5: figures(2, 0.5), 6: figures(3, 0.75)}
    log_evaluations(tmp_path / "nowhere")  # a run without batches has no lines
    assert not (tmp_path / "nowhere").exists()


class MemorySink:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.written: list[tuple[int, dict[str, float]]] = []
        self.amended: list[tuple[int, dict[str, float]]] = []

    def open(self) -> int:
        return max((step for step, _ in self.written), default=0)

    def write(self, step: int, time_s: float, scalars: Mapping[str, float]) -> None:
        self.written.append((step, dict(scalars)))

    def amend(self, step: int, time_s: float, scalars: Mapping[str, float]) -> None:
        self.amended.append((step, dict(scalars)))

    def flush(self) -> None: ...

    def close(self) -> None: ...


def test_a_sink_gets_each_evaluation_with_a_line_and_the_last_ones_at_the_end(tmp_path: Path) -> None:
    record(tmp_path, 0, 0.25, "evaluation_before.json")
    log = RunLog(tmp_path)
    log.open(0)
    log.append(lines(0))
    sink = MemorySink()

    def wait(seconds: float) -> bool:
        """The run ends during the follower's first look."""
        record(tmp_path, 1, 0.5, "evaluation_after.json")
        log_evaluations(tmp_path)
        return True

    Follower(sink, tmp_path, tmp_path / STATUS, wait).run()
    before = {"policy_version": 0, "pass_at_1": 0.25, "standard_error": 0.02, "pass_at_k/1": 0.25, "pass_at_k/8": 0.9}
    fields = {"batch_id": 0.0, "policy_version": 1.0}
    assert sink.written == [(1, {"step": 1.0, **fields, **named(before)}), (2, {"step": 2.0, **fields})]
    after = {**before, "policy_version": 1, "pass_at_1": 0.5, "pass_at_k/1": 0.5}
    assert sink.amended == [(2, named(after))]


def named(scalars: Mapping[str, float]) -> dict[str, float]:
    return {f"evaluation/{name}": value for name, value in scalars.items()}


def test_the_newest_evaluation_is_read_at_each_scrape(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    LearnerMetrics(registry).watch_evaluations(RecordedEvaluations(tmp_path))

    def seen() -> list[float | None]:
        name = "nouscoder_learner_evaluation"
        rates = [registry.get_sample_value(f"{name}_pass_at_k", {"k": k}) for k in ("1", "8")]
        return [*rates, *(registry.get_sample_value(f"{name}_{what}") for what in ("standard_error", "policy_version"))]

    assert seen() == [0.0, None, 0.0, -1.0]
    record(tmp_path, 0, 0.25, "evaluation_before.json")
    assert seen() == [0.25, 0.9, 0.02, 0.0]
    record(tmp_path, 12, 0.5)
    assert seen() == [0.5, 0.9, 0.02, 12.0]
    (tmp_path / "evaluations" / "00000013.json").write_text('{"policy_version": 13}')
    assert seen() == [0.5, 0.9, 0.02, 12.0], "a record without a result is left out"


@pytest.mark.parametrize("name", ["reward_mean", "pass_rate"])
def test_the_figures_of_all_groups_are_exported_beside_those_of_trained_groups(name: str) -> None:
    registry = CollectorRegistry()
    LearnerMetrics(registry)
    assert registry.get_sample_value(f"nouscoder_learner_all_groups_{name}") == 0.0
    assert registry.get_sample_value("nouscoder_learner_pass_at_g", {"groups": "all"}) == 0.0
    assert registry.get_sample_value("nouscoder_learner_pass_at_g", {"groups": "trained"}) == 0.0
