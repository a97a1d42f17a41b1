"""`nouscoder objectives compare`: one recorded batch under every published objective."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nouscoder.cli.app import app
from nouscoder.config import Config, LearnerSection, RunSection, dump_config
from nouscoder.domain.batch import RecordedBatch, RecordedRollout
from nouscoder.learner.compare import Comparison, compare
from nouscoder.learner.model.synthetic import random_batch, random_policy, write_policy_folder
from nouscoder.learner.publication.publisher import PolicyPublisher, StagedPolicy
from nouscoder.learner.state.saved_batches import SavedBatches
from nouscoder.learner.trainer import Trainer
from nouscoder.objectives.registry import PUBLISHED
from nouscoder.report.bar_charts import BarChart, bar_figure
from nouscoder.report.charts import Series, format_number
from nouscoder.report.objectives_page import bar_charts
from nouscoder.store.rollout_record import encode_rollout

SETTINGS = LearnerSection(steps_per_batch=1, max_gradient_norm=1e9)


def by_name(comparisons: list[Comparison]) -> dict[str, Comparison]:
    return {item.name: item for item in comparisons}


def test_losses_and_gradient_norms_are_those_of_a_step_of_the_trainer() -> None:
    batch = random_batch(0, seed=1)
    found = by_name(compare(random_policy(0), random_policy(0), batch, SETTINGS))
    assert set(found) == set(PUBLISHED)
    for name, objective in PUBLISHED.items():
        settings = SETTINGS.model_copy(update={"objective": objective})
        (step,) = Trainer(random_policy(0), Config(learner=settings)).train_batch(batch).steps
        assert found[name].loss == pytest.approx(step.loss, rel=1e-4, abs=1e-6)
        assert found[name].gradient_norm == pytest.approx(step.gradient_norm, rel=1e-4)


def test_cosines_and_shares_show_what_differs() -> None:
    """With an old policy that differs, GSPO clips whole rollouts, and a micro-batch limit changes nothing."""
    batch = random_batch(0, seed=1)
    policy, old = random_policy(0), random_policy(1)
    found = by_name(compare(policy, old, batch, SETTINGS))
    cut = by_name(compare(policy, old, batch, SETTINGS.model_copy(update={"microbatch_tokens": 80})))
    for name, item in found.items():
        assert item.cosines[name] == pytest.approx(1.0)
        assert item.clipped.overall == pytest.approx(cut[name].clipped.overall)
        assert item.loss == pytest.approx(cut[name].loss, rel=1e-4, abs=1e-6)
        for other in found:
            assert item.cosines[other] == found[other].cosines[name]
    assert found["dapo"].cosines["grpo+"] == pytest.approx(1.0), "they are one formula"
    assert found["dapo"].cosines["gspo"] != pytest.approx(1.0, abs=1e-3)
    gspo = found["gspo"].clipped
    assert 0 < found["dapo"].clipped.overall < gspo.overall <= 1
    counts = [graded.rollout.num_sampled_tokens for graded in batch.rollouts]
    right = sum(count for count, graded in zip(counts, batch.rollouts, strict=True) if graded.reward > 0)
    assert gspo.accepted is not None
    assert gspo.rejected is not None
    whole = gspo.accepted * right + gspo.rejected * (sum(counts) - right)
    assert whole == pytest.approx(gspo.overall * sum(counts)), "the shares of parts make the share of the whole"


async def recorded_run(folder: Path) -> Path:
    """A run folder with one saved batch and the policies before and after it. Returns the batch's file."""
    config = Config(run=RunSection(name="mine", root=folder), learner=SETTINGS)
    run = config.run.folder
    run.mkdir()
    (run / "config.toml").write_text(dump_config(config))
    write_policy_folder(run / "policy", random_policy(0))
    PolicyPublisher(run / "policies", keep=4, shard_bytes=20_000).write(StagedPolicy.of(random_policy(1), 1, 1))
    batch = random_batch(0, seed=1)
    encoded = [encode_rollout(graded.rollout) for graded in batch.rollouts]

    async def records() -> AsyncIterator[bytes]:
        for _, record in encoded:
            yield record

    rollouts = tuple(
        RecordedRollout(header, graded.verdict, graded.reward, "")
        for (header, _), graded in zip(encoded, batch.rollouts, strict=True)
    )
    await SavedBatches(run / "batches", keep=2).save(RecordedBatch(0, rollouts, 0), records())
    return run / "batches" / "00000000.batch"


async def test_the_command_compares_a_saved_batch_of_a_run(tmp_path: Path) -> None:
    file = await recorded_run(tmp_path)
    answer = CliRunner().invoke(app, ["objectives", "compare", str(file), "--json"])
    assert answer.exit_code == 0, answer.output
    figures = {item["name"]: item for item in json.loads(answer.stdout)}
    expected = by_name(compare(random_policy(1), random_policy(0), random_batch(0, seed=1), SETTINGS))
    for name, item in expected.items():
        assert figures[name]["loss"] == pytest.approx(item.loss, rel=1e-5)
        assert figures[name]["cosines"]["dapo"] == pytest.approx(item.cosines["dapo"], abs=1e-5)
    table = CliRunner().invoke(app, ["objectives", "compare", str(file)])
    assert all(name in table.stdout for name in PUBLISHED)
    assert "cosine between gradients" in table.stdout


async def test_what_is_missing_is_named(tmp_path: Path) -> None:
    file = await recorded_run(tmp_path)
    missing = CliRunner().invoke(app, ["objectives", "compare", str(file), "--policy", "7"])
    assert missing.exit_code != 0
    assert "00000007 is not there (kept: 00000001)" in str(missing.exception)
    other = tmp_path / "00000001.batch"
    other.write_bytes(file.read_bytes())
    outside = CliRunner().invoke(app, ["objectives", "compare", str(other)])
    assert "is not runs/NAME/batches/NUMBER.batch" in str(outside.exception)
    (file.parents[1] / "policy").rename(tmp_path / "policy")
    homeless = CliRunner().invoke(app, ["objectives", "compare", str(file)])
    assert str(homeless.exception) == f"{file.parents[1] / 'policy'} is not a folder, so it holds no policy"


async def test_the_page_has_every_figure(tmp_path: Path) -> None:
    file, page = await recorded_run(tmp_path), tmp_path / "page.html"
    answer = CliRunner().invoke(app, ["objectives", "compare", str(file), "--json", "--html", str(page)])
    assert answer.exit_code == 0, answer.output
    text, figures = page.read_text(), json.loads(answer.stdout)
    assert "<title>Objectives on batch 00000000 of mine</title>" in text
    for title in ("Loss", "Norm of the gradient", "Clipped tokens by correctness", "Clipped tokens by length"):
        assert f"<h3>{title}</h3>" in text
    charts = {chart.title: chart for chart in bar_charts(figures)}
    assert charts["Loss"].series[0].values == tuple(item["loss"] for item in figures)
    assert [series.name for series in charts["Clipped tokens by correctness"].series] == [
        "accepted rollouts",
        "rejected rollouts",
    ]
    for item in figures:
        assert f">{format_number(item['gradient_norm'])}</td>" in text
        for cosine in item["cosines"].values():
            assert f">{cosine:.3f}</td>" in text


def test_bars_go_to_both_sides_of_zero_and_a_missing_value_has_none() -> None:
    svg = bar_figure(BarChart("t", ("a", "b", "c"), (Series("s", (2.0, -1.0, None)),)))
    # 312 pixels from -1 to 2: zero is at 132 + 104.
    assert '<rect class="fill-0" x="236.0" y="6" width="208.0" height="16"/>' in svg
    assert '<rect class="fill-0" x="132.0" y="34" width="104.0" height="16"/>' in svg
    assert svg.count("<rect") == 2
