"""One prompt for a policy and a problem: the same token ids in training, evaluation, fine-tuning and the served API.

With -s the table of all recipe files is printed.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tests.domain.test_prompt import BEGIN, FUNCTION, QUESTION, STARTER, STDIN, SYSTEM
from tests.services.qwen3_tokenizer import qwen3_folder
from transformers import AutoTokenizer
from typer.testing import CliRunner

from nouscoder.cli.app import app
from nouscoder.cli.evaluate import _asked
from nouscoder.config import Config, ConfigError, EnvironmentSection, load_config
from nouscoder.data.problem_index import ProblemIndex, open_index_of
from nouscoder.data.problem_parquet import load_problems
from nouscoder.data.problems import save_problems
from nouscoder.domain.problem import Problem
from nouscoder.domain.prompt import PromptForm, PromptSettings, PromptText
from nouscoder.domain.rollout import Sampling
from nouscoder.domain.submission import CallCase, CallTests, StdinCase, StdinTests
from nouscoder.evaluation.pass_at_1 import evaluation_tasks
from nouscoder.evaluation.problems import NothingToEvaluate, Window, check_prompt, read_evaluated
from nouscoder.evaluation.samples import SamplingSettings
from nouscoder.generation.environments.prompts import Prompts
from nouscoder.generation.openai.completions import PromptEncoder
from nouscoder.generation.openai.schema import ChatRequest, CompletionRequest, parsed
from nouscoder.generation.process import _asking
from nouscoder.policy_folder.prompt_file import (
    MOST_BYTES,
    PROMPT_FILE,
    PromptFileUnusable,
    prompt_json,
    prompt_lines,
    recorded_prompt,
    trained_prompt,
    with_recorded_prompt,
)
from nouscoder.policy_folder.tokenizer import PolicyTokenizer, load_tokenizer
from nouscoder.run.preflight import checked_fine_tuning, misled_lines, with_policy_folder
from nouscoder.run.starter import starter, write_starter
from nouscoder.sft.encoder import Encoder
from nouscoder.sft.records import example_of

RECIPES = sorted(
    file for file in (Path(__file__).parents[2] / "configs").glob("*.toml") if 'prompt_form = "' in file.read_text()
)
OURS = {"demo", "demo-real", "demo-self-play", "small-real", "smollm2-135m"}
PROBLEMS = [
    Problem("stdin", QUESTION, StdinTests((StdinCase("1 2\n", "3\n"),))),
    Problem("function", QUESTION, CallTests("add", (CallCase((1, 2), {}, 3),)), starter_code=STARTER),
    Problem("bare function", QUESTION, CallTests("add", (CallCase((1, 2), {}, 3),))),
]
# NousResearch/atropos at 296a0bc, environments/code_execution_server/coding_server.py, get_prompt.
NOUS_ANSWER = "### Answer: (use the provided format with backticks)\n\n"
NOUS_STDIN = (
    f"Question: {QUESTION}\n\nRead the inputs from stdin, solve the problem, and write the answer to stdout (do not"
    " directly test on the sample inputs). Enclose your code within delimiters as follows. Ensure that when the python"
    " program runs it reads the inputs runs the algorithm and writes output to STDOUT.\n"
    f"```python\n# YOUR CODE HERE\n```\n\n{NOUS_ANSWER}"
)
NOUS_FUNCTION = (
    f"Question: {QUESTION}\n\nYou will use the following starter code to write the solution to the problem and enclose"
    f" your code within delimiters.\n```python\n{STARTER}\n```\n\n{NOUS_ANSWER}"
)
NOUS_BARE = f"Question: {QUESTION}\n\n{NOUS_ANSWER}"
EOS = [151645, 151643]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy folder with the real tokenizer of Qwen3."""
    folder = tmp_path_factory.mktemp("qwen3") / "policy"
    shutil.copytree(qwen3_folder(), folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return folder


@pytest.fixture(scope="module")
def tokenizer(qwen3: Path) -> PolicyTokenizer:
    return load_tokenizer(qwen3)


@pytest.fixture(scope="module")
def problem_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stdin problem and a function problem, as files have them."""
    file = tmp_path_factory.mktemp("problems") / "problems.jsonl"
    save_problems(file, PROBLEMS)
    return file


@pytest.fixture(scope="module")
def index(problem_file: Path) -> Any:
    with closing(open_index_of(problem_file)) as opened:
        yield opened


def in_training(config: Config, tokenizer: PolicyTokenizer, file: Path) -> list[list[int]]:
    """The prompts of an environment."""
    prompts = Prompts(tokenizer, config.generation.environment)
    return [prompts.prompt_of(task) for task in evaluation_tasks(load_problems(file), 1, Sampling())]


def in_fine_tuning(config: Config, tokenizer: PolicyTokenizer, file: Path) -> list[list[int]]:
    """The prompts of examples with the fields of the problem file."""
    encoder = Encoder(tokenizer, config.generation.environment)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    return [encoder.encode(example_of({**one, "completion": "1"})).prompt_token_ids.tolist() for one in records]


def in_evaluation(
    config: Config, policy: Path | None, tokenizer: PolicyTokenizer, file: Path, index: ProblemIndex
) -> list[list[int]]:
    """The prompts of `nouscoder eval`, as the API of `serve generation` encodes its requests."""
    settings = SamplingSettings("m", prompt=_asked(config, policy, "")[0])
    encoder = PromptEncoder(tokenizer, 40_000)
    requests = [settings.request(problem, 0) for problem in read_evaluated(file, index, Window())]
    return asyncio.run(_encoded(encoder, requests))


def in_service(config: Config, tokenizer: PolicyTokenizer, file: Path, index: ProblemIndex) -> list[list[int]]:
    """The prompts of a client of `serve generation` that says nothing of thinking."""
    asked = config.generation.environment.record(PromptSettings).resolved(has_chat_template=True)
    encoder = PromptEncoder(tokenizer, 40_000, asked.enable_thinking)
    settings = SamplingSettings("m", prompt=replace(asked, thinking="auto"))
    requests = [settings.request(problem, 0) for problem in read_evaluated(file, index, Window())]
    return asyncio.run(_encoded(encoder, requests))


async def _encoded(encoder: PromptEncoder, requests: Sequence[dict[str, Any]]) -> list[list[int]]:
    found = []
    for request in requests:
        body = json.dumps(request).encode()
        if "messages" in request:
            found.append(list(await encoder.of_chat(parsed(ChatRequest, body), "")))
        else:
            found += [list(ids) for ids in await encoder.of_completion(parsed(CompletionRequest, body), "")]
    return found


def test_every_recipe_of_a_publication_names_the_form_of_its_prompt() -> None:
    configs = (Path(__file__).parents[2] / "configs").glob("*.toml")
    assert {file.stem for file in configs} - {file.stem for file in RECIPES} == OURS


def test_every_recipe_asks_in_one_way_everywhere(
    qwen3: Path, tokenizer: PolicyTokenizer, problem_file: Path, index: ProblemIndex, tmp_path: Path
) -> None:
    theirs = AutoTokenizer.from_pretrained(qwen3)
    published = [theirs.encode(_in_template(theirs, text), add_special_tokens=False) for text in (STDIN, FUNCTION)]
    trained = shutil.copytree(qwen3, tmp_path / "trained")
    for recipe in RECIPES:
        config = load_config(recipe, [f"policy.path={qwen3}"])
        ids = in_training(config, tokenizer, problem_file)
        (trained / PROMPT_FILE).write_text(prompt_json(trained_prompt(config)))
        # The commands are given nothing but the policy that was trained.
        later = load_config(None, [f"policy.path={trained}"])
        known = with_policy_folder(later)
        ways = {
            "train": in_training(known, tokenizer, problem_file),
            "eval": in_evaluation(later, trained, tokenizer, problem_file, index),
            "sft": in_fine_tuning(known, tokenizer, problem_file),
            "serve generation": in_service(_asking(later, trained), tokenizer, problem_file, index),
        }
        print(f"{recipe.stem:26}", [f"{len(one)} tokens {hash(tuple(one)) % 16**6:06x}" for one in ids], *ways)
        assert {name: found == ids for name, found in ways.items()} == dict.fromkeys(ways, True), recipe.stem
        assert ids[0] != ids[1]
        if config.generation.environment.prompt_form is PromptForm.LIVECODEBENCH:
            assert ids[:2] == published, recipe.stem
        if config.generation.environment.prompt_form is PromptForm.NOUSCODER:
            texts = [_in_template(theirs, text) for text in (NOUS_STDIN, NOUS_FUNCTION, NOUS_BARE)]
            assert ids == [theirs.encode(text, add_special_tokens=False) for text in texts], recipe.stem


def _in_template(tokenizer: Any, text: str) -> str:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


@pytest.mark.parametrize(
    "keys",
    [
        ["prompt_as=text"],
        ["prompt_as=text", "prompt_form=livecodebench"],
        ["thinking=off", "system_prompt=Be brief.", "prompt_template='{prompt}\n\nIn Python.'"],
    ],
)
def test_what_a_run_sets_is_taken_by_later_commands(
    keys: list[str],
    qwen3: Path,
    tokenizer: PolicyTokenizer,
    problem_file: Path,
    index: ProblemIndex,
    tmp_path: Path,
) -> None:
    sets = [f"generation.environment.{key}" for key in keys]
    run = load_config(None, [*sets, f"policy.path={qwen3}"])
    ids = in_training(run, tokenizer, problem_file)
    trained = shutil.copytree(qwen3, tmp_path / "trained")
    (trained / PROMPT_FILE).write_text(prompt_json(trained_prompt(run)))
    later = load_config(None, [f"policy.path={trained}"])
    assert in_training(with_policy_folder(later), tokenizer, problem_file) == ids
    assert in_fine_tuning(with_policy_folder(later), tokenizer, problem_file) == ids
    assert in_evaluation(later, trained, tokenizer, problem_file, index) == ids
    assert [*prompt_lines(with_policy_folder(later).generation.environment, trained)] == [
        f"prompts: {trained_prompt(run).described}, as in the policy's training"
    ]


def test_a_prompt_in_the_template_already_has_the_same_tokens_everywhere_as_text(
    qwen3: Path, tokenizer: PolicyTokenizer, tmp_path: Path
) -> None:
    theirs = AutoTokenizer.from_pretrained(qwen3)
    problem = replace(PROBLEMS[0], prompt=_in_template(theirs, QUESTION))
    save_problems(tmp_path / "rendered.jsonl", [problem])
    config = load_config(None, [f"policy.path={qwen3}", "generation.environment.prompt_as=text"])
    wanted = [theirs.encode(problem.prompt, add_special_tokens=False)]
    assert in_training(config, tokenizer, tmp_path / "rendered.jsonl") == wanted
    assert in_fine_tuning(config, tokenizer, tmp_path / "rendered.jsonl") == wanted
    with closing(open_index_of(tmp_path / "rendered.jsonl")) as index:
        assert in_evaluation(config, None, tokenizer, tmp_path / "rendered.jsonl", index) == wanted


def test_init_train_sft_and_eval_ask_alike_and_set_keys_win(
    qwen3: Path, tokenizer: PolicyTokenizer, problem_file: Path, index: ProblemIndex, tmp_path: Path
) -> None:
    write_starter(tmp_path / "my.toml", starter(str(qwen3), str(problem_file), "my"))
    mine = load_config(tmp_path / "my.toml")
    ids = in_training(mine, tokenizer, problem_file)
    trained = shutil.copytree(qwen3, tmp_path / "trained")
    (trained / PROMPT_FILE).write_text(prompt_json(trained_prompt(mine)))
    assert in_evaluation(load_config(None), trained, tokenizer, problem_file, index) == ids
    sft = with_recorded_prompt(load_config(None), trained)
    assert in_fine_tuning(sft, tokenizer, problem_file) == ids
    recorded = recorded_prompt(trained)
    assert recorded is not None
    write_starter(tmp_path / "again.toml", starter(str(trained), str(problem_file), "again", prompt=asdict(recorded)))
    assert in_training(load_config(tmp_path / "again.toml"), tokenizer, problem_file) == ids

    other = with_recorded_prompt(load_config(None, ["generation.environment.prompt_template='{prompt}'"]), trained)
    assert in_training(other, tokenizer, problem_file) != ids
    words = ["data", "inspect", str(problem_file), "--prompt", "--set", f"policy.path={trained}"]
    shown = CliRunner().invoke(app, words).output
    assert recorded.prompt_template.partition("{prompt}")[2].strip()[:20] in shown, "as training asks it"
    assert [*prompt_lines(other.generation.environment, trained)] == [
        "prompts: messages, form plain; the policy was trained with messages, form plain, a template around it"
        f" (prompt_template is not as in {PROMPT_FILE})"
    ]
    of_option, lines = _asked(load_config(None), trained, "lcb")
    assert (of_option.prompt_form, of_option.prompt_template) == ("livecodebench", recorded.prompt_template)
    assert "(prompt_form is not as in" in lines[0]


def test_a_policy_that_was_not_trained_here_is_asked_in_its_chat_template(qwen3: Path, tmp_path: Path) -> None:
    config = load_config(None, [f"policy.path={qwen3}"])
    assert with_policy_folder(config).generation.environment == config.generation.environment
    assert [*prompt_lines(config.generation.environment, qwen3)] == ["prompts: messages, form plain"]
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert [*prompt_lines(config.generation.environment, tmp_path)] == []


def test_a_form_that_asks_a_function_problem_to_read_stdin_is_told(problem_file: Path, index: ProblemIndex) -> None:
    asking = EnvironmentSection(prompt_form=PromptForm.DEEPCODER)
    without = [replace(problem, starter_code="") for problem in PROBLEMS[:2]]
    for form in (PromptForm.PLAIN, PromptForm.LIVECODEBENCH, PromptForm.NOUSCODER, PromptForm.ACEREASON):
        assert misled_lines(EnvironmentSection(prompt_form=form), without) == []
        assert "stdin" not in PromptSettings(prompt_form=form).text(PromptText.of(without[1]))
    assert misled_lines(asking, [replace(without[1], prompt=prompt) for prompt in (FUNCTION, BEGIN)]) == []
    assert misled_lines(asking, without) == [
        "1 of 2 held-out problems, such as function, have no starter code and call tests, and the form deepcoder"
        ' asks them to read stdin: import the set again, or take generation.environment.prompt_form "plain"'
    ]
    evaluated = read_evaluated(problem_file, index, Window())[:2]
    check_prompt(evaluated, asking.record(PromptSettings))
    with pytest.raises(NothingToEvaluate, match="the form deepcoder needs starter code for function, which has"):
        check_prompt([replace(one, starter_code="") for one in evaluated], asking.record(PromptSettings))


GOOD = json.loads(prompt_json(PromptSettings("messages")))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("[" * 5000, "recursion|Expecting value"),
        ("[]", "it must have the keys prompt_as, .*date and no others"),
        (json.dumps({**GOOD, "chat_template": "x"}), "and no others"),
        (json.dumps({**GOOD, "prompt_as": "sms"}), "prompt_as: "),
        (json.dumps({**GOOD, "prompt_form": "mine"}), "prompt_form: "),
        (json.dumps({**GOOD, "system_prompt": 1}), "system_prompt: "),
        (json.dumps({**GOOD, "system_prompt": "\ud800"}), "surrogates not allowed"),
        (json.dumps({**GOOD, "prompt_template": "no place"}), "prompt_template: "),
        (json.dumps({**GOOD, "prompt_template": "{prompt}" * 1000}), "prompt_template must have {prompt} once"),
        (json.dumps({**GOOD, "system_prompt": "x" * MOST_BYTES}), "it has more than 64 KiB"),
        (b"\xff\xfe{", "decode"),
    ],
)
def test_a_damaged_or_hostile_file_is_refused_in_one_sentence(text: str | bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / PROMPT_FILE).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PromptFileUnusable, match=why) as fault:
        recorded_prompt(tmp_path)
    assert str(fault.value).startswith(f"{tmp_path / PROMPT_FILE} is no description of a policy's prompt: ")
    assert "\n" not in str(fault.value)
    assert len(str(fault.value)) < 600
    with pytest.raises(ConfigError, match=r"policy\.path: .*is no description"):
        checked_fine_tuning(load_config(None, [f"policy.path={tmp_path}"]))
