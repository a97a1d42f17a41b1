"""The options of `nouscoder demo` become values of its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from typer.testing import CliRunner

from nouscoder.cli.app import app
from nouscoder.config import load_config
from nouscoder.config.recipe import recipe_path
from nouscoder.demo.functions import function_problems
from nouscoder.demo.problems import Split


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ([], ["generation.engine=torch"]),
        (
            ["--engine", "vllm"],
            [
                "generation.engine=vllm",
                "generation.vllm.enforce_eager=true",
                "generation.vllm.dtype=float32",
                "generation.vllm.kv_cache_memory_bytes=268435456",
            ],
        ),
        (["--set", "generation.engine=fake"], ["generation.engine=torch", "generation.engine=fake"]),
    ],
)
def test_the_demo_has_an_option_for_the_engine(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], values: list[str]
) -> None:
    given: list[Sequence[str]] = []

    async def noted(*, overrides: Sequence[str], **_: object) -> int:
        given.append(overrides)
        return 0

    monkeypatch.setattr("nouscoder.demo.run.demo_run", noted)
    answer = CliRunner().invoke(app, ["demo", *arguments])
    assert answer.exit_code == 0, answer.output
    assert given == [values]


@pytest.mark.parametrize("in_bfloat16", [True, False])
def test_the_demo_with_a_real_model_has_its_recipe_and_the_faster_type(
    monkeypatch: pytest.MonkeyPatch, in_bfloat16: bool
) -> None:
    given: list[dict[str, Any]] = []

    async def noted(**values: Any) -> int:
        given.append(values)
        return 0

    monkeypatch.setattr("nouscoder.demo.run.demo_run", noted)
    monkeypatch.setattr("nouscoder.demo.run.computes_in_bfloat16", lambda: in_bfloat16)
    for arguments in ([], ["--gpu"]):
        answer = CliRunner().invoke(app, ["demo", "--real", *arguments])
        assert answer.exit_code == 0, answer.output
    types = ["generation.dtype=bfloat16", "learner.dtype=bfloat16"] if in_bfloat16 else []
    assert [each["recipe"] for each in given] == ["demo-real", "smollm2-135m"]
    assert given[0]["overrides"] == ["generation.engine=torch", *types]
    assert CliRunner().invoke(app, ["demo", "--gpu"]).exit_code == 2


@pytest.mark.parametrize("recipe", ["demo-real", "smollm2-135m"])
def test_the_recipes_of_the_real_model_ask_for_problems_that_exist(recipe: str) -> None:
    config = load_config(recipe_path(recipe))
    assert config.demo.problems == "functions"
    for split, size in ((Split.TRAIN, config.demo.train_problems), (Split.HELD_OUT, config.demo.held_out_problems)):
        assert len(function_problems(split, size, seed=0)) == size


@pytest.mark.parametrize("alone", [["--pass-rates", "easy.jsonl"], ["--smoke-batches", "3"], ["--json"]])
def test_an_option_of_the_smoke_test_alone_is_refused(alone: list[str]) -> None:
    answer = CliRunner().invoke(app, ["train", "my.toml", *alone])
    assert answer.exit_code == 2
    assert "it is for --smoke64" in answer.output
