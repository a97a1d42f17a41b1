"""`nouscoder recipes` and `train --recipe`: what they print follows from the files, and leads to a run."""

from __future__ import annotations

import json
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
from tests.command_line import nouscoder

from nouscoder.cli.app import app
from nouscoder.config import Config, load_config
from nouscoder.config.recipe import Origin, recipe_names, recipe_path, recipe_values
from nouscoder.data.importers.formats import FORMATS
from nouscoder.run import preflight

OURS = ("demo", "demo-real", "demo-self-play", "small-real", "smollm2-135m")
PUBLISHED = [name for name in recipe_names() if name not in OURS]


def printed(*arguments: str, code: int = 0) -> str:
    answer = nouscoder(*arguments)
    assert answer.exit_code == code, answer.output
    return answer.output


def test_the_table_has_every_published_recipe_with_its_model_and_stages() -> None:
    records = json.loads(printed("recipes", "--json"))
    assert [record["name"] for record in records] == PUBLISHED
    assert all(record["source"] for record in records)
    lines = printed("recipes").splitlines()
    assert [line.split()[:2] for line in lines] == [[record["name"], record["base_model"] or "-"] for record in records]
    assert "32k > 40k > yarn" in next(line for line in lines if line.startswith("nouscoder-14b-dapo "))


@pytest.mark.parametrize("name", recipe_names())
def test_every_value_of_a_file_is_shown_once_under_its_origin(name: str) -> None:
    """A number cannot drift: what is shown is read from the file itself."""
    tree = tomllib.loads(recipe_path(name).read_text(encoding="utf8"))
    tree.pop("recipe", None)
    values = list(recipe_values(recipe_path(name)))
    found: dict[str, object] = {}
    for each in values:
        found |= flat(tomllib.loads(f"x = {each.value}")["x"], each.key)
    assert found == flat(tree)
    assert len({each.key for each in values}) == len(values)
    shown = printed("recipes", "show", name)
    assert all(f"  {each.key} = {each.value}" in shown for each in values)
    assert all(f"\n{origin.value}: " in shown for origin in Origin)


def flat(node: object, key: str = "") -> dict[str, object]:
    if isinstance(node, dict):
        parts = [flat(child, f"{key}.{name}".lstrip(".")) for name, child in node.items()]
    elif isinstance(node, list) and node and isinstance(node[0], dict):
        parts = [flat(child, f"{key}[{number}]") for number, child in enumerate(node)]
    else:
        return {key: node}
    return {name: value for part in parts for name, value in part.items()}


def test_the_comment_beside_a_value_says_where_it_is_from() -> None:
    origins = {each.key: each.origin for each in recipe_values(recipe_path("nouscoder-14b-dapo"))}
    assert origins["broker.group_size"] is Origin.EXACT
    assert origins["learner.microbatch_tokens"] is Origin.APPROXIMATE


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_data_commands_of_a_recipe_exist_and_make_the_files_that_its_run_reads(name: str) -> None:
    config = load_config(recipe_path(name), folder=Path("/place"))
    made = set()
    for command in config.recipe.data:
        words = shlex.split(command)
        parameters = parsed(words[1:])
        made.add(str(parameters["out"]))
        if words[1:3] == ["data", "import"]:
            assert parameters["name"] in FORMATS
        elif words[1:3] == ["data", "filter"]:
            selection = tomllib.loads(recipe_path(str(parameters["recipe"]), "data").read_text(encoding="utf8"))
            made |= {*selection.get("imports", {})}
    wanted = {config.recipe.train, config.recipe.held_out} - {""}
    for index in range(len(config.plan.stages)):
        train = str(config.of_stage(index).problems.train)
        wanted |= {Path(train).name} if train.startswith("/place") else set()
    assert wanted <= made


def parsed(words: list[str]) -> dict[str, object]:
    """The parameters of a command, which is not run."""
    command = typer.main.get_command(app)
    context = command.make_context("nouscoder", [], resilient_parsing=True)
    while isinstance(command, typer.core.TyperGroup):
        words = words if words[0] in command.commands else ["run", *words]  # RunByDefault
        command, words = command.commands[words[0]], words[1:]
    return dict(command.make_context("", list(words), parent=context).params)


def test_a_recipe_whose_data_is_missing_asks_no_hub_and_names_the_commands_of_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []

    def downloaded(hub_id: str) -> Path:
        asked.append(hub_id)
        return tmp_path / "cache"

    monkeypatch.setattr(preflight, "downloaded", downloaded)
    said = printed("train", "--recipe", "deepcoder-14b", code=78)
    assert asked == []
    commands = load_config(recipe_path("deepcoder-14b")).recipe.data
    assert f"problems.train: {tmp_path / 'deepcoder.parquet'} does not exist" in said
    assert all(f"\n  {command}\n" in said for command in commands)
    assert not list(tmp_path.iterdir())


def test_a_recipe_file_without_a_model_names_the_option_that_fetches_it(tmp_path: Path) -> None:
    said = printed("train", str(recipe_path("acecoder-7b")), "--set", f"run.root={tmp_path}", code=78)
    assert "the recipe's is fetched with: --set policy.path=Qwen/Qwen2.5-Coder-7B-Instruct" in said


def test_the_values_of_set_come_after_those_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found: list[Config] = []

    async def noted(config: Config, **_: object) -> int:
        found.append(config)
        return 0

    monkeypatch.setattr("nouscoder.run.plan.train_plan", noted)
    printed("train", "--recipe", "klear-reasoner-8b", "--set", "policy.path=mine", "--set", "run.name=n")
    (config,) = found
    assert (config.run.name, config.policy.path) == ("n", tmp_path / "mine")
    assert config.problems.held_out == tmp_path / "livecodebench_test.parquet"
    assert [config.of_stage(index).problems.train for index in (0, 1)] == [
        tmp_path / "math.parquet",
        tmp_path / "code.parquet",
    ]


@pytest.mark.parametrize("arguments", [[], ["my.toml", "--recipe", "deepcoder-14b"]])
def test_a_run_has_a_file_or_a_recipe(arguments: list[str]) -> None:
    assert "give CONFIG or --recipe NAME" in " ".join(printed("train", *arguments, code=2).split())


def test_an_unknown_recipe_is_refused_with_the_known_ones() -> None:
    assert "there is no recipe 'x' (known recipes: acecoder-7b" in printed("train", "--recipe", "x", code=78)


def test_show_says_what_set_changes_and_init_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sets = ["--set", "plan.stages.40k.learner.learning_rate=1e-5", "--set", "run.total_batches=3"]
    said = printed("recipes", "show", "nouscoder-14b-dapo", *sets)
    assert "changed by --set: 2 values\n  run.total_batches = 3\n  plan.stages.1.set.learner.learning_rate" in said
    assert "did you mean learner?" in printed("recipes", "show", "nouscoder-14b-dapo", "--set", "lerner.x=1", code=78)
    printed("init", "--out", "own.toml", "--set", "run.total_batches=3")
    assert load_config(tmp_path / "own.toml").run.total_batches == 3
    assert "unknown key run.batches" in printed("init", "--out", "two.toml", "--set", "run.batches=3", code=78)
    assert not (tmp_path / "two.toml").exists()
