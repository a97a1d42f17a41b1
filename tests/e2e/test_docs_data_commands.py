"""Runs the commands of the documents on data, evaluation, fine-tuning and reward models, as a new user would.

A block is run if its fence is `sh tested`, all blocks of a document in one folder, in their order, with what a user has
before: a model folder, problem files, data sets and servers. Any other `sh` block names the test that runs it. The
servers are one server with OpenAI's API; only its address and the names of large models are replaced.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.openai_mock import MockServer, completion, serving
from tests.services.test_data_import import SUM_ROWS, jsonl, lcb, packed
from typer.testing import CliRunner

from nouscoder.cli.app import app
from nouscoder.data.filters.run import read_recipe, select
from nouscoder.data.importers.options import ImportOptions
from nouscoder.data.importers.run import import_files
from nouscoder.learner.model.synthetic import random_policy, write_policy_folder

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("data", "evaluation", "sft", "recipes", "self-play")
FENCE = re.compile(r"^```(?P<info>sh[^\n]*)\n(?P<script>.*?)^```\n(?P<after>[^\n]*)", re.DOTALL | re.MULTILINE)
GIVES = re.compile(r"<!-- gives: (.*) -->")
RUN_BY = re.compile(r"<!-- run by: (\S+) -->")
RECIPE = re.compile(r"```toml\n(name = \"mine\".*?)```", re.DOTALL)

SOLUTION = "```python\nprint(sum(map(int, input().split())))\n```"
HALF = "```python\nprint(3)\n```"  # passes one test of two
WRITTEN = (
    "<question>Write add(a, b).</question>\n<tests>\n"
    + "".join(f"assert add({n}, {n + 1}) == {2 * n + 1}\n" for n in range(20))
    + "</tests>"
)
ADD = "```python\ndef add(a, b):\n    return a + b\n```"


def blocks(document: str) -> list[tuple[str, str, str]]:
    """(info, script, line after the fence) of each block."""
    text = (ROOT / "docs" / f"{document}.md").read_text(encoding="utf8")
    return [(found["info"], found["script"], found["after"]) for found in FENCE.finditer(text)]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """A model that solves sums half of the time, writes a problem with tests, and solves that."""
    content = request["messages"][-1]["content"]
    if "The text:" in content:
        return completion(WRITTEN)
    if "add(a, b)" in content:
        return completion(ADD)
    return completion(SOLUTION if request["seed"] % 2 else HALF)


def problem(number: int) -> dict[str, Any]:
    """A problem with two tests and a reference."""
    cases = [{"input": "1 2\n", "output": "3\n"}, {"input": f"{number} 5\n", "output": f"{number + 5}\n"}]
    prompt = f"Read two integers and print their sum. This is variant {number} of {'abcdefgh'[number % 8] * 5}."
    return {"problem_id": f"p{number}", "prompt": prompt, "tests": {"type": "stdin", "cases": cases * 3}}


@pytest.fixture(scope="module", params=DOCUMENTS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A document, and a working directory with what its commands name."""
    folder = tmp_path_factory.mktemp("place")
    write_policy_folder(folder / "model", random_policy(0))
    for name in ("policy", "small"):
        (folder / name).symlink_to("model")
    for name, count in (("problems", 4), ("other", 2), ("own", 3)):
        jsonl(folder / f"{name}.jsonl", *(problem(number) for number in range(count)))
    rows = [
        lcb("stdin", SUM_ROWS[:1], packed([{**SUM_ROWS[1], "testtype": "stdin"}]), question_id=f"abc{n}")
        | {"contest_date": f"2024-1{n}-03T00:00:00"}
        for n in range(3)
    ]
    jsonl(folder / "test6.jsonl", *rows)
    taco = {"inputs": ["1 2\n"] * 5, "outputs": ["3\n"] * 5}
    jsonl(folder / "taco.jsonl", *({"question": f"Sum {n}.", "input_output": json.dumps(taco)} for n in range(2)))
    import_files("taco", [folder / "taco.jsonl"], folder / "taco.parquet", options=ImportOptions(max_tests=15))
    import_files("livecodebench", [folder / "test6.jsonl"], folder / "livecodebench.parquet")
    held = {
        "problem": "Print the cube of n.",
        "problem_type": "stdin_stdout",
        "tests": {"input": ["2"], "output": ["8"]},
    }
    jsonl(folder / "lcb_test.jsonl", held)
    import_files("nouscoder", [folder / "lcb_test.jsonl"], folder / "lcb_test.parquet")
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "all.toml").write_text('name = "all"\ninputs = ["problems.jsonl"]\nsteps = [{filter = "num_tests"}]')
    select(read_recipe(folder / "all.toml"), folder / "problems.parquet")
    (folder / "rows.csv").write_text('statement,cases\nSum.,"[{""input"": ""1 2"", ""output"": ""3""}]"\n')
    traces = [{"problem_id": f"t{n}", "prompt": f"Print {n}.\n", "completion": f"print({n})"} for n in range(40)]
    jsonl(folder / "traces.jsonl", *traces)
    elsewhere = {"question": "-", "dataset": "taco", "split": "train", "index": "1", "r1_generation": SOLUTION}
    jsonl(folder / "reasoning.jsonl", elsewhere)
    jsonl(folder / "seeds.jsonl", {"seed_id": "one", "text": "Adding numbers."})
    return request.param, folder


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)
    torch.use_deterministic_algorithms(False)


def commands(script: str) -> list[list[str]]:
    """The arguments of each command of a block."""
    lines = script.replace("\\\n", " ").splitlines()
    split = [shlex.split(line, comments=True) for line in lines]
    return [arguments for arguments in split if arguments]


@pytest.mark.timeout(600)
def test_each_documented_command_gives_its_documented_output(
    place: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    document, folder = place
    monkeypatch.chdir(folder)
    text = (ROOT / "docs" / f"{document}.md").read_text(encoding="utf8")
    if recipe := RECIPE.search(text):
        (folder / "mine.toml").write_text(recipe[1])
    with serving(MockServer(answer)) as mock:
        for info, script, after in blocks(document):
            if info != "sh tested":
                continue
            told = ""
            for words in commands(script):
                assert words[0] == ".venv/bin/nouscoder", words
                arguments = [re.sub(r"http://[\w.]+:\d+/v1", mock.url, word) for word in words[1:]]
                done = CliRunner().invoke(app, ["model" if word == "Qwen/Qwen3-8B" else word for word in arguments])
                if done.exception is not None and not isinstance(done.exception, SystemExit):
                    raise done.exception
                assert done.exit_code == 0, (words, done.output)
                told += done.output
            wanted = GIVES.fullmatch(after)
            assert wanted is not None, script
            assert wanted[1] in told, (script, told)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_other_block_names_the_test_that_runs_it(document: str) -> None:
    for info, script, after in blocks(document):
        if info == "sh tested":
            continue
        named = RUN_BY.fullmatch(after)
        assert named is not None, f"docs/{document}.md: {script}"
        test = ROOT / named[1]
        assert test.is_file(), test
        for words in commands(script):  # so that a renamed command is noticed
            content = test.read_text(encoding="utf8")
            assert words[1] in content or f"docs/{document}.md" in content, (words, test)
