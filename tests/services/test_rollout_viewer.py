"""The viewer of rollouts: the learner's records of tokens, their bound on disk, and the page made from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.config import Config, LearnerSection
from nouscoder.learner.metrics import token_records
from nouscoder.learner.metrics.step import TrainedBatch
from nouscoder.learner.metrics.token_records import TokenRecords, kept
from nouscoder.learner.model.synthetic import random_batch, random_policy, write_policy_folder
from nouscoder.learner.trainer import Trainer
from nouscoder.objectives.dapo import Dapo
from nouscoder.policy_folder.tokenizer import PolicyTokenizer, load_tokenizer
from nouscoder.report.rollouts_page import read_rollouts, rollouts_page, write_rollouts_page


def trained(samples: int, microbatch_tokens: int = 100) -> TrainedBatch:
    """A batch of two steps. The first one is large, so that the clip acts in the second."""
    settings = LearnerSection(
        steps_per_batch=2,
        learning_rate=0.1,
        microbatch_tokens=microbatch_tokens,
        samples_per_batch=samples,
        objective=Dapo(),
    )
    return Trainer(random_policy(0), Config(learner=settings)).train_batch(random_batch(3, seed=1, policy_version=3))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    folder = tmp_path_factory.mktemp("policy")
    write_policy_folder(folder, random_policy(0))
    return load_tokenizer(folder)


def test_traces_of_all_rollouts_add_up_to_the_diagnostics_of_the_steps() -> None:
    batch = trained(samples=1000)
    assert len(batch.traces) == len(batch.scored) == 16
    for step in batch.steps:
        traces = [trace for trace in batch.traces.values() if trace.step == step.step]
        ratios = [ratio for trace in traces for ratio in trace.ratios]
        assert len(ratios) == step.num_tokens
        assert mean(ratios) == pytest.approx(step.diagnostics["ratio_mean"], rel=1e-5)
        assert (min(ratios), max(ratios)) == pytest.approx(
            (step.diagnostics["ratio_min"], step.diagnostics["ratio_max"])
        )
        mismatches = [value for trace in traces for value in trace.mismatches]
        assert mean(mismatches) == pytest.approx(step.diagnostics["mismatch_mean"], rel=1e-5)
        clips = step.diagnostics["clip_fraction_low"] + step.diagnostics["clip_fraction_high"]
        assert mean(clip for trace in traces for clip in trace.clipped) == pytest.approx(clips)
    first, second = (step.diagnostics for step in batch.steps)
    assert (first["ratio_min"], first["ratio_max"]) == (1.0, 1.0)
    assert second["clip_fraction_low"] + second["clip_fraction_high"] > 0


def test_a_batch_has_traces_of_the_rollouts_of_its_samples(tokenizer: PolicyTokenizer) -> None:
    from nouscoder.learner.state.run_log import sample_lines

    batch = trained(samples=5)
    assert {line["rollout_id"] for line in sample_lines(batch, tokenizer.decode, 5, 0)} == set(batch.traces)
    assert trained(samples=0).traces == {}


def test_the_file_of_a_batch_has_each_token_with_its_values(tmp_path: Path, tokenizer: PolicyTokenizer) -> None:
    batch = trained(samples=4)
    records = TokenRecords(tmp_path)
    records.write(batch, 4, tokenizer)
    file = tmp_path / "tokens" / "00000003.json"
    text = file.read_bytes()
    found = json.loads(text)
    assert (found["batch_id"], found["policy_version"], len(found["rollouts"])) == (3, 4, 4)
    by_id = {scored.graded.rollout.rollout_id: scored for scored in batch.scored}
    for record in found["rollouts"]:
        scored, trace = by_id[record["rollout_id"]], batch.traces[record["rollout_id"]]
        rollout = scored.graded.rollout
        assert "".join(record["tokens"]) == rollout.text
        assert len(record["tokens"]) == record["length"] == rollout.num_sampled_tokens
        assert record["ratios"] == [round(ratio, 4) for ratio in trace.ratios]
        assert record["clipped"] == [int(flag) for flag in trace.clipped]
        spans = [span.policy_version for span in rollout.versions for _ in range(span.num_tokens)]
        assert record["versions"] == spans
        assert (record["advantage"], record["reward"]) == (scored.advantage, scored.graded.reward)
        assert record["left_out"] == 0
    records.write(trained(samples=4), 4, tokenizer)
    assert file.read_bytes() == text, "training it again writes the same"


def test_a_long_rollout_keeps_its_first_and_last_tokens(
    tmp_path: Path, tokenizer: PolicyTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_records, "_MAX_TOKENS", 6)
    batch = trained(samples=1000)
    TokenRecords(tmp_path).write(batch, 4, tokenizer)
    texts = {scored.graded.rollout.rollout_id: scored.graded.rollout.text for scored in batch.scored}
    records = json.loads((tmp_path / "tokens" / "00000003.json").read_text())["rollouts"]
    assert any(record["left_out"] for record in records)
    for record in records:
        text, size = texts[record["rollout_id"]], len(record["tokens"])
        assert size == min(6, len(text)) == record["length"] - record["left_out"]
        assert "".join(record["tokens"]) == (text if size < 6 else text[:3] + text[-3:])


@given(st.integers(1, 3000))
def test_a_run_keeps_few_files_the_newest_ones_and_some_over_the_whole_run(count: int) -> None:
    there: list[int] = []
    for number in range(count):
        there = sorted(kept([*there, number]))
    assert len(there) <= 32
    assert there[-min(16, count) :] == list(range(max(0, count - 16), count))
    if count > 16:
        older = there[:-16]
        assert older[0] == 0
        distances = {after - before for before, after in pairwise(older)}
        assert len(distances) <= 1
        assert len(older) >= min(8, count - 16)


def record_of(number: int, tokens: Sequence[str], **more: Any) -> dict[str, Any]:
    """A record as the learner writes it."""
    size = len(tokens)
    return {
        "rollout_id": f"r{number}",
        "problem_id": "p",
        "step": number,
        "verdict": "accepted",
        "reward": 1.0,
        "advantage": 0.5,
        "staleness": 1,
        "length": size,
        "overlong": False,
        "prompt": "Add.",
        "left_out": 0,
        "tokens": list(tokens),
        "versions": [number] * size,
        "ratios": [1.0] * size,
        "mismatches": [1.0] * size,
        "clipped": [0] * size,
        **more,
    }


def write_records(run: Path, *batches: list[dict[str, Any]]) -> None:
    (run / "tokens").mkdir(parents=True)
    for number, rollouts in enumerate(batches):
        record = {"batch_id": number, "policy_version": number + 1, "rollouts": rollouts}
        (run / "tokens" / f"{number:08d}.json").write_text(json.dumps(record))


def embedded(page: str) -> list[dict[str, Any]]:
    """The records in the page."""
    data = page.partition('id="rollouts-data">')[2].partition("</script>")[0]
    found: list[dict[str, Any]] = json.loads(data)
    return found


def test_a_page_is_bounded_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    write_records(tmp_path, [record_of(0, "abcdefghij")], [record_of(1, "klm"), record_of(2, "nopqrs", left_out=5)])
    shown = embedded(rollouts_page(tmp_path, max_tokens=12))
    assert [("".join(one["tokens"]), one["left_out"], one["batch_id"]) for one in shown] == [
        ("abij", 6, 0),
        ("klm", 0, 1),
        ("nors", 7, 1),
    ]
    assert all(len(one["ratios"]) == len(one["tokens"]) for one in shown)


def test_a_page_says_of_how_many_its_rollouts_are_a_sample(tmp_path: Path) -> None:
    write_records(tmp_path, [record_of(0, "ab"), record_of(1, "cd")], [record_of(2, "ef")])
    (tmp_path / "config.toml").write_text("[broker]\nbatch_size = 64\n")
    lines = [{"step": step, "batch_id": step // 2} for step in range(160)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = rollouts_page(tmp_path)
    assert "<dt>batches</dt><dd>2 of 80</dd>" in page
    assert "<dt>rollouts</dt><dd>3 of 5\u2009120</dd>" in page
    assert "A sample" in page


def test_damaged_files_and_a_run_without_records_have_a_page(tmp_path: Path) -> None:
    assert "There are no records of tokens yet" in rollouts_page(tmp_path)
    write_records(tmp_path, [record_of(0, "ab")])
    (tmp_path / "tokens" / "00000001.json").write_text('{"batch_id": 1, "roll')
    (tmp_path / "tokens" / "00000002.json").write_text("[]")
    assert [one["rollout_id"] for one in read_rollouts(tmp_path)] == ["r0"]
    page = write_rollouts_page(tmp_path)
    assert page.name == "rollouts.html"
    assert embedded(page.read_text())[0]["tokens"] == ["a", "b"]


def test_a_token_cannot_end_the_data_or_turn_the_text(tmp_path: Path) -> None:
    write_records(tmp_path, [record_of(0, ["</script><script>alert(1)</script>", "\u202e"])])
    page = rollouts_page(tmp_path)
    assert "<script>alert" not in page
    assert embedded(page)[0]["tokens"] == ["</script><script>alert(1)</script>", "\\u202e"]
