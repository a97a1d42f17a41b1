"""The published recipes: each loads, has its published numbers, is in the document, and trains a tiny policy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nouscoder.config import Config, DistillationSettings, LearnerSection, load_config
from nouscoder.learner.loading import prepare_thread
from nouscoder.learner.model.synthetic import random_batch, random_policy
from nouscoder.learner.objectives.registry import OBJECTIVES
from nouscoder.learner.trainer import Trainer

ROOT = Path(__file__).parents[2]
OTHERS = ("demo", "demo-real", "demo-self-play", "small-real", "smollm2-135m")
RECIPES = sorted(path.stem for path in (ROOT / "configs").glob("*.toml") if path.stem not in OTHERS)

# Group size, learning rate, temperature, steps a batch, objective, reward: as docs/recipes.md calls them exact.
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "nouscoder-14b-dapo": (8, 1e-6, 1.0, 4, "dapo", "sign"),
    "nouscoder-14b-gspo": (8, 1e-6, 1.0, 4, "gspo", "sign"),
    "nouscoder-14b-gspo-plus": (8, 1e-6, 1.0, 4, "gspo", "sign"),
    "deepcoder-14b": (8, 1e-6, 0.6, 1, "grpo", "binary"),
    "klear-reasoner-8b": (8, 1e-6, 1.0, 8, "gppo", "soft"),
    "skywork-or1-7b": (16, 1e-6, 1.0, 1, "grpo", "binary"),
    "skywork-or1-32b": (16, 1e-6, 1.0, 1, "grpo", "binary"),
    "acereason-7b": (8, 5e-6, 0.6, 1, "grpo", "binary"),
    "acereason-14b": (8, 5e-6, 0.6, 1, "grpo", "binary"),
    "r1-code-interpreter-14b": (5, 1e-6, 1.0, 1, "grpo", "r1_code_interpreter"),
    "acecoder-7b": (8, 5e-7, 1.0, 1, "reinforce_plus_plus", "binary"),
}


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    threads = torch.get_num_threads()
    prepare_thread(1)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def recipe(name: str) -> Config:
    return load_config(ROOT / "configs" / f"{name}.toml")


def test_every_recipe_is_checked_here_and_described_in_the_document() -> None:
    assert set(RECIPES) == set(PUBLISHED)
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf8")
    assert [name for name in RECIPES if name not in text] == []


def test_the_document_has_the_defaults_of_every_objective() -> None:
    rows = (ROOT / "docs" / "recipes.md").read_text(encoding="utf8").splitlines()
    for kind in OBJECTIVES:
        section = kind.model_validate({"teacher": "t"} if kind is DistillationSettings else {})
        (row,) = [row for row in rows if row.startswith(f"| `{section.name}` | ")]
        numbers = [float(number) for number in re.findall(r"(?<!\w)[\d.]+", row)]
        values = section.model_dump()
        if "clip_low" in values:
            assert numbers[:2] == [values["clip_low"], values["clip_high"]]
        assert f"`{section.aggregation}`" in row


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_its_published_numbers(name: str) -> None:
    config = recipe(name)
    learner, sampling = config.learner, config.generation.sampling
    found = (config.broker.group_size, learner.learning_rate, sampling.temperature, learner.steps_per_batch)
    assert (*found, learner.objective.name, config.broker.reward.rule) == PUBLISHED[name]
    assert sampling.max_new_tokens < config.generation.max_tokens_total


# Context and temperature of each stage; a stage in STAGES_OF_EVALUATION trains nothing.
STAGES: dict[str, tuple[tuple[int, float], ...]] = {
    **dict.fromkeys(
        ("nouscoder-14b-dapo", "nouscoder-14b-gspo", "nouscoder-14b-gspo-plus"),
        ((32767, 1.0), (40959, 1.0), (81919, 0.6)),
    ),
    "deepcoder-14b": ((16384, 0.6), (32768, 0.6), (65536, 0.6)),
    **dict.fromkeys(("skywork-or1-7b", "skywork-or1-32b"), ((8192, 1.0), (16384, 1.0), (32768, 1.0))),
    **dict.fromkeys(
        ("acereason-7b", "acereason-14b"),
        ((8192, 0.6), (16384, 0.6), (24576, 0.6), (32768, 0.6), (24576, 0.6), (32768, 1.0)),
    ),
    "klear-reasoner-8b": ((32768, 1.0), (32768, 1.0)),
}
STAGES_OF_EVALUATION = {"yarn", "64k"}


@pytest.mark.parametrize("name", RECIPES)
def test_every_stage_loads_and_has_its_published_numbers(name: str) -> None:
    config = recipe(name)
    stages = [config.of_stage(index) for index in range(len(config.plan.stages))]
    stages = [stage if stage.run.total_batches else stage.evaluating for stage in stages]
    found = [(stage.generation.sampling.max_new_tokens, stage.generation.sampling.temperature) for stage in stages]
    assert tuple(found) == STAGES.get(name, ())
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
