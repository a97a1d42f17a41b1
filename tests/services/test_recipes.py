"""The published recipes: each loads, has its published numbers, is in the document, and trains a tiny policy."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from nouscoder.config import Config, LearnerSection, load_config
from nouscoder.config.learner import ComputeType, OptimizerStates
from nouscoder.config.recipe import Origin, recipe_path, recipe_values
from nouscoder.learner.loading import prepare_thread
from nouscoder.learner.model.synthetic import random_batch, random_policy
from nouscoder.learner.trainer import Trainer
from nouscoder.run.token_limits import length_faults

ROOT = Path(__file__).parents[2]
OTHERS = ("demo", "demo-real", "demo-self-play", "small-real", "smollm2-135m")
RECIPES = sorted(path.stem for path in (ROOT / "configs").glob("*.toml") if path.stem not in OTHERS)


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    threads = torch.get_num_threads()
    prepare_thread(1)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@cache
def recipe(name: str) -> Config:
    return load_config(ROOT / "configs" / f"{name}.toml")


# The table of docs/design/recipes-table.md.

TABLE = ROOT / "docs" / "design" / "recipes-table.md"  # a link to configs/recipes-table.md
_TEXT = TABLE.read_text(encoding="utf8")
_STATE = re.compile(r"works|unknown|approximate \(.+\)")
# What every recipe must say.
ESSENTIAL = {
    *("broker.group_size", "broker.batch_size", "broker.reward.rule", "broker.drop_zero_variance", "broker.pipeline_k"),
    *("learner.objective.name", "learner.objective.aggregation", "learner.learning_rate", "learner.steps_per_batch"),
    *("generation.sampling.max_new_tokens", "generation.sampling.temperature"),
}


@dataclass(frozen=True)
class Row:
    """A row of the table: the recipes that it is of, its (place, key, value) triples, its state and its test."""

    recipes: tuple[str, ...]
    what: str
    values: tuple[tuple[str, str, Any], ...]
    state: str
    test: str


def rows() -> Iterator[Row]:
    recipes: tuple[str, ...] = ()
    for line in _TEXT.splitlines():
        if line.startswith("## "):
            recipes = tuple(line[3:].split(", "))
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| ") or cells[0] == "number or rule":
            continue
        assert len(cells) == 4, line
        found = re.findall(r"`(?:((?:stage|data) [\w-]+): )?([\w.]+) = ([^`]+)`", cells[1])
        assert len(found) == cells[1].count(" = "), line
        values = tuple((place, key, tomllib.loads(f"value = {value}")["value"]) for place, key, value in found)
        yield Row(recipes, cells[0], values, cells[2], cells[3].strip("`"))


def valued(config: Any, key: str) -> Any:
    found = config
    for name in key.split("."):
        found = getattr(found, {"from": "start"}.get(name, name))
    return list(found) if isinstance(found, tuple) else found.name if isinstance(found, Path) else found


def found_values(name: str, place: str, key: str) -> list[Any]:
    """The values of a key: one, or those of the steps of a selection that have it."""
    kind, _, within = place.partition(" ")
    if kind == "data":
        tree = tomllib.loads((ROOT / "configs" / "data" / f"{within}.toml").read_text(encoding="utf8"))
        step, _, field = key.partition(".")
        steps = [*tree["steps"], *({"filter": "import", **one} for one in tree.get("imports", {}).values())]
        return [one.get(field) for one in steps if one["filter"] == step]
    config = recipe(name)
    if not kind:
        return [valued(config, key)]
    names = [stage.name for stage in config.plan.stages]
    of_plan = key.split(".")[0] in ("from", "yarn")
    number = names.index(within)
    return [valued(config.plan.stages[number] if of_plan else config.of_stage(number), key)]


def test_every_number_of_the_table_is_that_of_its_file() -> None:
    table = list(rows())
    assert len(table) >= 80
    said = {(name, key) for row in table for name in row.recipes for _, key, _ in row.values}
    assert [(name, key) for name in RECIPES for key in sorted(ESSENTIAL) if (name, key) not in said] == []
    assert {name for row in table for name in row.recipes} == set(RECIPES)
    wrong = [
        (name, row.what, place, key, value, found)
        for row in table
        for name in row.recipes
        for place, key, value in row.values
        if value not in (found := found_values(name, place, key))
    ]
    assert wrong == []


def test_every_row_has_a_state_and_a_test_that_exists() -> None:
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf8"), re.MULTILINE)
    }
    assert [row.what for row in rows() if not _STATE.match(row.state)] == []
    assert [(row.what, row.test) for row in rows() if row.test not in defined | {"number"}] == []


# What is ours in every recipe, beside what says so: names, and the files of the commands.
STRUCTURE = re.compile(
    r"plan\.stages\[\d+\]\.(name|set\.problems\.train)|broker\.curriculum\.(name|pass_rates)|.*\bsystem_prompt"
)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_show_calls_each_value_what_the_table_calls_it(name: str) -> None:
    """The table is the one place of the states: each value that it names is shown with the state of its row."""
    shown = {each.key: each for each in recipe_values(recipe_path(name))}
    stages = [stage.name for stage in recipe(name).plan.stages]
    wanted: dict[str, str] = {}
    for row in rows():
        for place, key, _ in row.values if name in row.recipes else ():
            number = f"plan.stages[{stages.index(place[6:])}]" if place.startswith("stage ") else ""
            places = [f"{number}.set.{key}", f"{number}.{key}", key] if number else [key]
            written = [one for full in places for one in shown if f"{full}.".startswith(f"{one}.")]
            if written and not place.startswith("data "):
                state = re.split(r"\W", row.state)[0]
                assert wanted.setdefault(written[0], state) == state, f"{written[0]} has two states"
    words = {"works": Origin.EXACT, "approximate": Origin.APPROXIMATE, "unknown": Origin.UNKNOWN}
    assert {key: shown[key].origin for key in wanted} == {key: words[state] for key, state in wanted.items()}
    others = [each for key, each in shown.items() if key not in wanted]
    assert {each.origin for each in others} <= {Origin.APPROXIMATE}
    silent = [each.key for each in others if "ours" not in each.comment and not STRUCTURE.fullmatch(each.key)]
    assert silent == [], "a value that no row has must say that it is ours"


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_of_a_real_model_computes_in_bfloat16(name: str) -> None:
    assert recipe(name).learner.dtype is ComputeType.BFLOAT16
    assert recipe(name).learner.optimizer_states is OptimizerStates.FLOAT32


def test_the_recipe_of_nouscoder_measures_and_trains_as_its_environment() -> None:
    """NousResearch/atropos, environments/code_execution_server/coding_server.py: config_init and offline_filter."""
    for kind in ("dapo", "gspo", "gspo-plus"):
        config = recipe(f"nouscoder-14b-{kind}")
        assert (config.run.total_batches, config.evaluation.every_batches, config.broker.group_size) == (600, 10, 8)
        form, sampling = config.generation.environment.prompt_form, config.generation.sampling
        (measure,) = [command.split() for command in config.recipe.data if " eval " in command]
        given = dict(zip(measure[3::2], measure[4::2], strict=True))
        assert given["--prompt"] == form == "nouscoder"
        assert (float(given["--temperature"]), float(given["--top-p"])) == (sampling.temperature, sampling.top_p)
        assert (given["--n"], given["--policy"]) == ("8", config.recipe.base_model)
        assert any("lcb_test" in command for command in config.recipe.data)


# (recipe, stage): temperature, top_p, top_k, samples, max_new_tokens, max_tokens_total of its evaluations.
EVALUATIONS = {
    ("klear-reasoner-8b", "code"): (0.6, 0.95, 0, 8, 32768, 36864),
    ("klear-reasoner-8b", "64k"): (0.6, 0.95, 20, 8, 65536, 81920),
    ("skywork-or1-7b", "32k"): (0.6, 1.0, 0, 8, 32768, 34816),
    ("skywork-or1-32b", "8k"): (0.6, 1.0, 0, 8, 8192, 10240),
    ("deepcoder-14b", "16k"): (0.6, 1.0, 0, 2, 16384, 18432),
    ("deepcoder-14b", "64k"): (0.6, 0.95, 0, 2, 65536, 67584),
    ("acereason-7b", "code-32k"): (0.6, 0.95, 0, 8, 32768, 34816),
    ("acereason-14b", "math-32k"): (0.6, 0.95, 0, 8, 32768, 34816),
    ("nouscoder-14b-dapo", "32k"): (0.6, 0.95, 0, 16, 40959, 40960),
    ("r1-code-interpreter-14b", ""): (0.6, 1.0, 0, 1, 8192, 16384),
    ("tinker-code-rl-4b", ""): (1.0, 1.0, 0, 8, 24576, 32768),
    ("nemotron-cascade-14b-thinking", ""): (0.6, 0.95, 0, 8, 57344, 59392),
}


@pytest.mark.parametrize(("name", "stage"), EVALUATIONS)
def test_evaluations_of_recipes_are_as_published(name: str, stage: str) -> None:
    config = recipe(name)
    if stage:
        config = config.of_stage([each.name for each in config.plan.stages].index(stage))
    measured = config.evaluating.generation
    sampling = measured.sampling
    found = (sampling.temperature, sampling.top_p, sampling.top_k, config.evaluation.samples, sampling.max_new_tokens)
    assert (*found, measured.max_tokens_total) == EVALUATIONS[name, stage]


def test_the_order_of_acereason_is_that_of_its_paper() -> None:
    """arXiv 2505.16400, section 3.4; the sets of the code stages are those of section 3.3.2."""
    for name, first in (("acereason-7b", "code-stage-1.parquet"), ("acereason-14b", "code.parquet")):
        config = recipe(name)
        files = {each.name: config.of_stage(i).problems.train.name for i, each in enumerate(config.plan.stages)}
        order = ["math-8k", "math-16k", "math-24k", "code-24k", "code-32k", "math-32k"]
        assert [*files] == order
        assert (files["code-24k"], files["code-32k"]) == (first, "code.parquet")


def test_tinker_grades_all_tests_in_six_seconds() -> None:
    """tinker_cookbook/recipes/code_rl/code_env.py: timeout 6, and no choice of tests."""
    (imported,) = [one for one in recipe("tinker-code-rl-4b").recipe.data if "import deepcoder" in one]
    assert "--time-limit 6" in imported
    assert "--max-tests" not in imported


def test_acecoder_gives_each_test_four_seconds() -> None:
    """openrlhf/cli/evalplus_eval.py: four times the least reference time, which was 1 s (evalplus 87486a3)."""
    (imported,) = [one for one in recipe("acecoder-7b").recipe.data if "import acecode" in one]
    assert "--time-limit 4 " in imported


def test_every_recipe_is_described_in_the_document() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf8")
    assert [name for name in RECIPES if name not in text] == []


STAGES_OF_EVALUATION = {"yarn", "64k"}


@pytest.mark.parametrize("name", RECIPES)
def test_every_stage_loads_and_leaves_room_for_a_prompt(name: str) -> None:
    config = recipe(name)
    assert config.generation.sampling.max_new_tokens < config.generation.max_tokens_total
    stages = [config.of_stage(index) for index in range(len(config.plan.stages))]
    stages = [stage if stage.run.total_batches else stage.evaluating for stage in stages]
    for section, stage in zip(config.plan.stages, stages, strict=True):
        assert (stage.run.total_batches == 0) == (section.name in STAGES_OF_EVALUATION)
        assert stage.generation.sampling.max_new_tokens < stage.generation.max_tokens_total
        if section.yarn.factor:
            assert section.yarn.positions == stage.generation.max_tokens_total == 81920


@pytest.mark.parametrize("name", RECIPES)
def test_each_stage_of_a_recipe_takes_two_steps_of_a_tiny_policy(name: str) -> None:
    config = recipe(name)
    stages = [config.of_stage(index) for index in range(len(config.plan.stages))] or [config]
    tried: list[LearnerSection] = []
    for stage in stages:
        # The context of a stage makes no difference for a tiny policy.
        learner = stage.learner.model_copy(update={"steps_per_batch": 2, "microbatch_tokens": 512})
        if learner in tried or not stage.run.total_batches:
            continue
        tried.append(learner)
        trainer = Trainer(random_policy(0), Config(learner=learner), lambda _: random_policy(0))
        steps = trainer.train_batch(random_batch(0, seed=1)).steps
        assert [step.skipped for step in steps] == [False, False]
        assert all(step.gradient_norm > 0 for step in steps)
    assert tried


@pytest.mark.parametrize("name", RECIPES)
def test_no_stage_of_a_recipe_contradicts_itself(name: str) -> None:
    """What the check before a start says without files, models or devices."""
    whole = recipe(name)
    stages = [whole.stage_run(index) for index in range(len(whole.plan.stages))]
    assert [[*length_faults(run), run.step_fault] for run in stages or [whole]] == [[""]] * (len(stages) or 1)
