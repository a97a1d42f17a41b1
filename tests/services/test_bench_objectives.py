"""The bench of the objectives: which runs it makes, what it reads from them, and that it repeats none."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from nouscoder.bench.errors import BenchError
from nouscoder.bench.objective_figures import ObjectiveBench, RunFigures, as_text, difference
from nouscoder.bench.objective_plot import plot
from nouscoder.bench.objectives import ON_POLICY, VARIANTS, ObjectivePlan, result_of, run_missing
from nouscoder.config import Config, load_config
from nouscoder.run.folder import RunFolder
from nouscoder.run.view import PlainView

SVG = "{http://www.w3.org/2000/svg}"

# The smallest real runs. The policy is untrained, so groups with equal rewards are kept.
TINY = (
    "demo.train_problems=60",
    "demo.warm_start_share=0.002",
    "demo.warm_start_threads=1",
    "broker.group_size=4",
    "broker.batch_size=16",
    "broker.drop_zero_variance=false",
    "generation.max_running=32",
    "generation.sampling.max_new_tokens=24",
)


def view() -> PlainView:
    return PlainView(Console(file=io.StringIO()))


def write_finished(config: Config, after: float, seconds_per_step: float) -> None:
    """The files of a finished run that the bench reads. Its first batch took 1000 s."""
    folder = RunFolder.create(config)
    folder.write_json("summary.json", {"seed": config.run.seed, "steps": config.total_steps})
    evaluations: dict[str, float] = {"before": 0.25, "after": after}
    for name, pass_at_1 in evaluations.items():
        folder.write_json(f"evaluation_{name}.json", {"pass_at_1": pass_at_1, "standard_error": 0.01})
    lines: list[dict[str, Any]] = []
    for step in range(config.total_steps):
        batch = step // config.learner.steps_per_batch
        time_s = 1000.0 + (seconds_per_step * (step + 1 - config.learner.steps_per_batch) if batch else 0.0)
        lines.append({"batch_id": batch, "time": time_s, "staleness_mean": float(batch % 2)})
    folder.write_text(folder.path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    folder.close()


def run(variant: str, seed: int, after: float) -> RunFigures:
    return RunFigures(variant, seed, 80, 0.25, 0.01, after, 0.02, 1.0, 0.5)


def test_all_runs_have_the_same_steps_the_same_rollouts_in_a_step_and_the_same_inputs(tmp_path: Path) -> None:
    plan = ObjectivePlan(tmp_path)
    configs = {variant: plan.config_of_run(variant, 2) for variant in VARIANTS}
    steps = {variant: config.learner.steps_per_batch for variant, config in configs.items()}
    assert {config.total_steps for config in configs.values()} == {80}
    assert {config.broker.batch_size // steps[variant] for variant, config in configs.items()} == {32}
    for section in ("problems", "policy", "demo", "generation", "verifier"):
        assert {getattr(config, section).model_dump_json() for config in configs.values()} == {
            getattr(configs["dapo"], section).model_dump_json()
        }
    assert {config.learner.learning_rate for config in configs.values()} == {3e-4}
    assert configs["dapo"].policy.path == plan.config_of_inputs(2).run.folder / "policy"
    assert len({config.learner.model_dump_json() for config in configs.values()}) == len(VARIANTS)


def test_the_on_policy_run_has_one_step_a_batch_and_one_batch_in_flight(tmp_path: Path) -> None:
    config = ObjectivePlan(tmp_path).config_of_run(ON_POLICY, 0)
    assert (config.learner.steps_per_batch, config.broker.pipeline_k) == (1, 1)
    assert config.learner.objective == ObjectivePlan(tmp_path).config_of_run("dapo", 0).learner.objective


def test_an_unknown_variant_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"no variant 'gpso'.*gspo"):
        ObjectivePlan(tmp_path).config_of_run("gpso", 0)


async def test_finished_runs_are_read_and_not_repeated(tmp_path: Path) -> None:
    plan = ObjectivePlan(tmp_path, num_seeds=2, variants=("dapo", ON_POLICY))
    for seed in (0, 1):
        write_finished(plan.config_of_inputs(seed), 0.25, 0.0)
        write_finished(plan.config_of_run("dapo", seed), 0.75 + 0.05 * seed, 0.5)
        write_finished(plan.config_of_run(ON_POLICY, seed), 0.75, 1.0)
    await run_missing(plan, view())
    result = result_of(plan)
    assert [(each.variant, each.seed) for each in result.runs] == [
        ("dapo", 0), ("dapo", 1), (ON_POLICY, 0), (ON_POLICY, 1)
    ]  # fmt: skip
    first = result.runs[0]
    assert (first.pass_at_1_before, first.pass_at_1_after, first.standard_error_after) == (0.25, 0.75, 0.01)
    assert (first.steps, first.staleness_mean) == (80, 0.5)
    assert first.seconds_per_step == pytest.approx(0.5), "the first batch does not count"
    compared = difference(result, "dapo", ON_POLICY)
    assert compared is not None
    assert compared.num_seeds == 2
    assert compared.speed_up == pytest.approx(2.0)
    assert compared.pass_at_1 == pytest.approx(0.025)
    assert compared.standard_error == pytest.approx(0.025)
    assert json.loads((tmp_path / "result.json").read_text())["dapo_minus_on_policy"]["num_seeds"] == 2
    assert "dapo minus on-policy: +2.5 +- 2.5 points" in as_text(result)


async def test_a_run_with_other_settings_is_refused(tmp_path: Path) -> None:
    plan = ObjectivePlan(tmp_path, num_seeds=1, variants=("dapo",))
    write_finished(plan.config_of_inputs(0), 0.25, 0.0)
    write_finished(plan.config_of_run("dapo", 0), 0.75, 0.5)
    with pytest.raises(BenchError, match=r"dapo-0 holds a run with another run.total_batches"):
        await run_missing(ObjectivePlan(tmp_path, 1, 41, ("dapo",)), view())


def test_the_table_has_a_row_for_each_variant_and_the_error_of_the_mean_gain() -> None:
    text = as_text(ObjectiveBench((run("dapo", 0, 0.65), run("dapo", 1, 0.75), run("gspo", 0, 0.5))))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert rows[2] == ["dapo", "0.250 to 0.650", "0.250 to 0.750", "+0.450 +- 0.050", "1.00", "0.50"]
    assert rows[3] == ["gspo", "0.250 to 0.500", "", "+0.250", "1.00", "0.50"]
    assert len(rows) == 4


def test_the_plot_has_a_ring_and_a_dot_for_each_run_at_its_values() -> None:
    tree = ElementTree.fromstring(plot(ObjectiveBench((run("dapo", 0, 0.65), run("gspo", 0, 0.45)))))
    ticks = {text.text: float(text.attrib["x"]) for text in tree.iter(f"{SVG}text") if text.text in ("0.0", "1.0")}

    def rate(circle: ElementTree.Element) -> float:
        return (float(circle.attrib["cx"]) - ticks["0.0"]) / (ticks["1.0"] - ticks["0.0"])

    circles = [*tree.iter(f"{SVG}circle")][2:]  # without the legend's
    assert [circle.attrib["class"] for circle in circles] == ["before", "after"] * 2
    assert [rate(circle) for circle in circles] == pytest.approx([0.25, 0.65, 0.25, 0.45], abs=1e-3)


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_a_real_bench_runs_each_variant_once(tmp_path: Path) -> None:
    plan = ObjectivePlan(tmp_path, 1, 3, ("gspo-plus", ON_POLICY), num_held_out=6, num_samples=1, overrides=TINY)
    await run_missing(plan, view())
    gspo_plus, on_policy = result_of(plan).runs
    assert gspo_plus.steps == on_policy.steps == 6
    assert gspo_plus.pass_at_1_before == on_policy.pass_at_1_before
    assert on_policy.staleness_mean == 0
    assert min(gspo_plus.seconds_per_step, on_policy.seconds_per_step) > 0
    recorded = load_config(tmp_path / "gspo-plus-0" / "config.toml")
    assert recorded.learner.objective.aggregation == "token_mean"
    written = (tmp_path / "gspo-plus-0" / "summary.json").stat().st_mtime_ns
    await run_missing(plan, view())
    assert (tmp_path / "gspo-plus-0" / "summary.json").stat().st_mtime_ns == written
