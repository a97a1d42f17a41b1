"""From raw files as the hub has them to a filtered training set, in one command for each published recipe."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.openai_mock import MockServer, completion, serving
from tests.services.test_data_filter import unlike_vector
from tests.services.test_data_import import jsonl, parquet
from tests.services.test_hub_rows import _offline  # noqa: F401  (nothing leaves this machine)
from typer.testing import CliRunner, Result

from nouscoder import openai_server
from nouscoder.cli.app import app
from nouscoder.data.filters.run import read_recipe
from nouscoder.data.problem_parquet import read_parquet
from nouscoder.domain.prompt import PromptSettings, PromptText
from nouscoder.domain.submission import MathCase, MathTests

ROOT = Path(__file__).parents[2]
LAYOUTS = ROOT / "tests" / "data" / "layouts"
RECIPES = ROOT / "configs" / "data"


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows of a layout."""
    return [json.loads(line) for line in (LAYOUTS / f"{name}.jsonl").read_text(encoding="utf8").splitlines()]


def hub_folder(folder: Path, name: str) -> Path:
    """The folder of a data set, as a download of it makes."""
    made = folder / name
    made.mkdir(parents=True)
    return made


def lay_out_nouscoder(folder: Path) -> None:
    jsonl(hub_folder(folder, "NousResearch/RLVR_Coding_Problems") / "rl_train.jsonl", *rows_of("nouscoder"))


def lay_out_deepcoder(folder: Path) -> None:
    """A folder for each part, which the card names, with a parquet file for each split."""
    made = hub_folder(folder, "agentica-org/DeepCoder-Preview-Dataset")
    parts: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows_of("deepcoder"):
        if row["part"] == "lcbv5":
            row["tests"] = json.dumps(json.loads(row["tests"]) * 3)  # more than 15
        parts.setdefault(row.pop("part"), {}).setdefault(row.pop("split"), []).append(row)
    card = ["---", "configs:"]
    for part, splits in parts.items():
        (made / part).mkdir()
        card += [f"- config_name: {part}", "  data_files:"]
        for split, rows in splits.items():
            parquet(made / part / f"{split}-00000-of-00001.parquet", *rows)
            card += [f"  - split: {split}", f"    path: {part}/{split}-*"]
    (made / "README.md").write_text("\n".join([*card, "---", ""]))


def lay_out_klear(folder: Path) -> None:
    file = hub_folder(folder, "Kwai-Klear/KlearReasoner-CodeSub-15K") / "train_code_rllm_clean.json"
    file.write_text(json.dumps(rows_of("klear")))
    lcb = hub_folder(folder, "livecodebench/code_generation_lite")
    for number, name in enumerate(("test", "test2", "test3", "test4", "test5", "test6")):
        jsonl(lcb / f"{name}.jsonl", *(row | {"question_id": f"q{number}"} for row in rows_of("livecodebench")))


def lay_out_skywork(folder: Path) -> None:
    made = hub_folder(folder, "Skywork/Skywork-OR1-RL-Data")
    (made / "data").mkdir()
    parquet(made / "data" / "code-00000-of-00001.parquet", *rows_of("skywork"))
    card = "configs:\n- config_name: default\n  data_files:\n  - split: code\n    path: data/code-*\n"
    (made / "README.md").write_text(f"---\n{card}---\n")


def lay_out_lcb_test(folder: Path) -> None:
    row = rows_of("nouscoder")[0]
    made = hub_folder(folder, "NousResearch/lcb_test")
    parquet(made / "test-00000-of-00001.parquet", row | {"tests": json.loads(row["tests"]), "difficulty": "easy"})


def selected(recipe: Path, folder: Path) -> Result:
    """What one command gives. The sandbox is a fake in which every program prints its input."""
    out = ["--folder", str(folder), "--out", str(folder / "chosen.parquet")]
    return CliRunner().invoke(app, ["data", "filter", str(recipe), *out, "--set", "verifier.sandbox.backend=fake"])


def kept(folder: Path) -> list[str]:
    """The names of the problems that were kept."""
    return [item.problem.problem_id for item in read_parquet(folder / "chosen.parquet")]


def test_nouscoder_imports_then_says_how_pass_rates_are_measured_then_selects(tmp_path: Path) -> None:
    lay_out_nouscoder(tmp_path)
    lay_out_lcb_test(tmp_path)  # its problem is nouscoder-1
    first = selected(RECIPES / "nouscoder.toml", tmp_path)
    assert first.exit_code != 0
    told = str(first.exception)
    assert f"there is no file {tmp_path / 'base'}: pass rates, which `nouscoder eval " in told
    assert f"{tmp_path / 'problems.parquet'} --policy MODEL --n 8 --out {tmp_path / 'base'}`" in told
    made = (tmp_path / "problems.parquet").stat().st_mtime_ns
    counts = {"nouscoder-1": 7, "nouscoder-2": 7, "nouscoder-3": 0, "nouscoder-4": 8}
    rates = [{"problem_id": name, "passed": passed, "sampled": 8} for name, passed in counts.items()]
    jsonl(tmp_path / "base", *rates)
    second = selected(RECIPES / "nouscoder.toml", tmp_path)
    assert second.exit_code == 0, second.output
    assert kept(tmp_path) == ["nouscoder-2", "nouscoder-3"]
    dropped = (tmp_path / "chosen.parquet.dropped.jsonl").read_text().splitlines()
    assert [(one["problem_id"], one["step"]) for one in map(json.loads, dropped)] == [
        ("nouscoder-1", "1 decontaminate"),
        ("nouscoder-4", "2 pass_rate"),
    ]
    assert (tmp_path / "problems.parquet").stat().st_mtime_ns == made  # it is not imported again


def test_deepcoder_is_made_of_its_parts(tmp_path: Path) -> None:
    lay_out_deepcoder(tmp_path)
    done = selected(RECIPES / "deepcoder.toml", tmp_path)
    assert done.exit_code == 0, done.output
    assert kept(tmp_path) == ["deepcoder-1", "deepcoder-4", "deepcoder-lcb-1"]
    items = {item.problem.problem_id: item.problem for item in read_parquet(tmp_path / "chosen.parquet")}
    assert [(one.limits.wall_time_s, len(one.tests.cases)) for one in items.values()] == [(12, 5), (12, 15), (6, 18)]
    dropped = (tmp_path / "chosen.parquet.dropped.jsonl").read_text().splitlines()
    assert [(one["problem_id"], one["step"]) for one in map(json.loads, dropped)] == [
        ("deepcoder-2", "1 num_tests"),
        ("deepcoder-5", "2 references_pass"),
        ("deepcoder-6", "3 exact_duplicates"),
        ("deepcoder-3", "4 near_duplicates"),
    ]


def test_klear_is_made_of_its_published_part(tmp_path: Path) -> None:
    lay_out_klear(tmp_path)
    done = selected(RECIPES / "klear-reasoner.toml", tmp_path)
    assert done.exit_code == 0, done.output
    assert kept(tmp_path) == ["klear-1", "klear-3"]
    one, other = (item.problem for item in read_parquet(tmp_path / "chosen.parquet"))
    assert "### Format" not in one.prompt + other.prompt
    assert other.starter_code == "def successor(n):"


@pytest.mark.parametrize("is_there", [True, pytest.param(False, marks=pytest.mark.heavy)])
def test_skywork_has_its_pass_rates_and_needs_a_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    if not is_there:
        once = replace(openai_server._WHILE_UNAVAILABLE, max_tries=1)
        monkeypatch.setattr(openai_server, "_WHILE_UNAVAILABLE", once)
    lay_out_skywork(tmp_path)
    recipe = tmp_path / "recipe.toml"
    with serving(MockServer(lambda request: completion("VERDICT: YES"), embeds=unlike_vector)) as mock:
        url = mock.url if is_there else "http://127.0.0.1:1/v1"
        recipe.write_text(re.sub(r"http://127.0.0.1:800\d/v1", url, (RECIPES / "skywork-or1.toml").read_text()))
        done = selected(recipe, tmp_path)
    if is_there:
        assert done.exit_code == 0, done.output
        assert kept(tmp_path) == ["skywork-1", "skywork-7", "skywork-8"]
        return
    assert done.exit_code != 0
    assert url in str(done.exception)
    assert "start again when the model is served there" in str(done.exception)
    assert (tmp_path / "skywork.parquet").exists()


@pytest.mark.parametrize("size", ["7B", "32B"])
def test_skywork_trains_on_the_problems_of_the_authors_scripts(tmp_path: Path, size: str) -> None:
    """or1_scripts/data_preprocess/download_and_filter_data_{7b,32b}.py: 1 <= model_difficulty <= 15 of the policy's own
    size, and train_files of the scripts: code twice, mathematics once."""
    code = [row for row in rows_of("skywork") if row["ability"] == "code"]
    for place, row in enumerate(code):  # as the 32B policy: 0, 6, 12, 1, 7, ... of 16 answers are wrong
        row["extra_info"]["model_difficulty"]["DeepSeek-R1-Distill-Qwen-32B"] = 6 * place % 17
    answer = {"style": "rule", "ground_truth": '["4"]'}
    asked = [{"role": "user", "content": "2 + 2?"}]
    difficulty = {f"DeepSeek-R1-Distill-Qwen-{one}": 8 for one in ("1.5B", "7B", "32B")}
    math = {**code[0], "ability": "math", "prompt": asked, "reward_model": answer}
    math["extra_info"] = {**code[0]["extra_info"], "model_difficulty": difficulty}
    made = hub_folder(tmp_path, "Skywork/Skywork-OR1-RL-Data")
    (made / "data").mkdir()
    card = ["configs:", "- config_name: default", "  data_files:"]
    for split, rows in (("code", code), ("math", [math])):
        parquet(made / "data" / f"{split}-00000-of-00001.parquet", *rows)
        card += [f"  - split: {split}", f"    path: data/{split}-*"]
    (made / "README.md").write_text("\n".join(["---", *card, "---", ""]))
    done = selected(RECIPES / f"skywork-or1-{size.lower()}.toml", tmp_path)
    assert done.exit_code == 0, done.output
    chosen = [item.problem for item in read_parquet(tmp_path / "chosen.parquet")]
    failures = [row["extra_info"]["model_difficulty"][f"DeepSeek-R1-Distill-Qwen-{size}"] for row in code]
    wanted = [row["prompt"][-1]["content"] for row, failed in zip(code, failures, strict=True) if 1 <= failed <= 15]
    asks = [PromptSettings().text(PromptText.of(one)) for one in chosen]
    assert len(set(asks) & set(wanted)) >= 2
    wanted = [one for one in wanted if one in asks]  # rows without tests that can be read are left out
    assert asks == [*wanted, *wanted, "2 + 2?"]
    assert chosen[-1].tests == MathTests((MathCase("4"),))  # the set has it as a list of one


def test_a_fault_of_an_import_is_named_before_anything_is_made(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    head = 'name = "x"\ninputs = ["a.parquet"]\nsteps = [{filter = "no_urls"}]\n[imports."a.parquet"]\n'
    recipe.write_text(head + 'format = "taco"\nfiles = ["a.jsonl"]\nmax_test = 5\n')
    done = selected(recipe, tmp_path)
    assert "imports.a.parquet: unknown key max_test: did you mean max_tests?" in str(done.exception)
    recipe.write_text(head + 'format = "taco"\nfiles = ["a.jsonl"]\n')
    assert "a.jsonl does not exist" in str(selected(recipe, tmp_path).exception)


def test_the_recipe_s_digest_has_its_imports(tmp_path: Path) -> None:
    files = []
    for number, options in enumerate(("", "max_tests = 5\n", "max_tests = 5 # again\n")):
        files.append(tmp_path / f"{number}.toml")
        files[-1].write_text(
            'name = "x"\ninputs = ["a.parquet"]\nsteps = [{filter = "no_urls"}]\n'
            f'[imports."a.parquet"]\nformat = "taco"\nfiles = ["a.jsonl"]\n{options}'
        )
    plain, some, again = (read_recipe(file).sha256 for file in files)
    assert plain != some == again


def test_the_documented_commands_make_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of docs/data.md that read a hub's data sets, here from folders of their names."""
    for lay_out in (lay_out_nouscoder, lay_out_lcb_test, lay_out_deepcoder, lay_out_klear, lay_out_skywork):
        lay_out(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf8")
    fences = re.findall(r"^```(sh[^\n]*)\n(.*?)^```\n([^\n]*)", text, re.DOTALL | re.MULTILINE)
    blocks = [script for _, script, after in fences if "test_published_selections.py" in after]
    commands = [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    assert len(commands) == 10
    for _, *arguments in commands:
        fake = ["--set", "verifier.sandbox.backend=fake"] if arguments[1] == "filter" else []
        done = CliRunner().invoke(app, [*arguments, *fake])
        assert done.exit_code == 0, (arguments, done.output, done.exception)
        assert Path(arguments[arguments.index("--out") + 1]).is_file()
