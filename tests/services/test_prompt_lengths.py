"""Prompts are counted before a run starts: those that leave no room for an answer are left out, with their number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nouscoder.config import Config, ConfigError, EnvironmentSection, load_config
from nouscoder.data.problem_index import held_out_problems, open_index, prompt_lengths
from nouscoder.data.problems import save_problems
from nouscoder.data.prompt_lengths import digest_of
from nouscoder.demo.policy import CharTokenizer
from nouscoder.domain.problem import Problem
from nouscoder.domain.prompt import PromptText
from nouscoder.domain.rollout import Sampling, Task
from nouscoder.domain.submission import StdinCase, StdinTests
from nouscoder.generation.environments.prompts import Prompts, counted
from nouscoder.policy_folder.tokenizer import load_tokenizer
from nouscoder.run import preflight, token_limits

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}[assistant]"
TESTS = StdinTests((StdinCase("1\n", "1\n"),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A policy folder whose tokenizer has one token a character, with a chat template."""
    CharTokenizer().save(tmp_path / "policy")
    file = tmp_path / "policy" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return tmp_path / "policy"


@pytest.mark.parametrize(
    "keys",
    [
        {"prompt_as": "text"},
        {"prompt_as": "messages"},
        {"system_prompt": "be short"},
        {"prompt_form": "livecodebench"},
        {"prompt_form": "livecodebench", "prompt_as": "text"},
    ],
)
def test_a_count_is_the_number_of_tokens_of_the_prompt_that_generation_writes(
    folder: Path, keys: dict[str, Any]
) -> None:
    settings = EnvironmentSection(prompt_template="solve: {prompt}", **keys)
    tokenizer = load_tokenizer(folder)
    texts = [
        PromptText("print 1"),
        PromptText("print 22", "{prompt}!"),  # without a system message among others
        PromptText("1" * 300),
        PromptText("print 1", "", "n = 0"),
    ]
    whole = json.loads(json.dumps([*texts, PromptText("caf\u00e9")]))
    request = {"folder": str(folder), "environment": settings.model_dump(), "texts": whole}
    *counts, of_unknown = counted(request)["counts"]
    prompts = Prompts(tokenizer, settings)
    tasks = [
        Task("r", "g", "p", one.prompt, Sampling(8), prompt_template=one.template, starter_code=one.starter_code)
        for one in texts
    ]
    assert counts == [len(prompts.prompt_of(task)) for task in tasks]
    assert of_unknown == 0, "generation refuses it"


class Counting:
    """Counts in this process, and records how many texts were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[int] = []
        monkeypatch.setattr(token_limits, "asked_of_models", self._answer)

    def _answer(self, function: str, request: dict[str, Any], more_s: float) -> dict[str, Any]:
        self.asked.append(len(request["texts"]))
        return counted(request)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    return Counting(monkeypatch)


def problems(prefix: str, lengths: Sequence[int]) -> list[Problem]:
    return [Problem(f"{prefix}{n}", "1" * length, TESTS) for n, length in enumerate(lengths)]


def config(folder: Path, *more: str) -> Config:
    home = folder.parent
    return load_config(
        None,
        [
            *(f"problems.train={home}/train.jsonl", f"problems.held_out={home}/held_out.jsonl"),
            *(f"policy.path={folder}", "generation.max_tokens_total=200", f"run.root={home}/runs"),
            *("generation.environment.prompt_as=text", *more),
        ],
    )


def faults(settings: Config) -> list[str]:
    return [*token_limits.prompt_faults(settings)]


def test_few_long_prompts_are_left_out_with_their_number_and_counted_once(folder: Path, counting: Counting) -> None:
    save_problems(folder.parent / "train.jsonl", problems("t", [20] * 18 + [250, 300]))
    save_problems(folder.parent / "held_out.jsonl", problems("h", [20] * 11 + [260]))
    settings = config(folder)
    assert faults(settings) == []
    assert token_limits.left_out_lines(settings) == [
        "2 of 20 training problems are left out as too long: their prompts have 251 to 301 tokens, and"
        " generation.max_tokens_total is 200",
        "1 of 12 held-out problems are left out as too long: their prompts have 261 tokens, and"
        " generation.max_tokens_total is 200",
    ]
    with closing(open_index(settings)) as index:
        assert dict(index.left_out) == {"t18": 251, "t19": 301}
        assert len(index.problem_ids) == 18
        assert len(index.all_ids) == 20
    assert "h11" not in {one.problem_id for one in held_out_problems(settings)}

    assert faults(settings) == []
    save_problems(folder.parent / "train.jsonl", problems("t", [20] * 18 + [250, 300] + [180] * 12))
    assert faults(settings) == []
    assert counting.asked == [3, 1], "short ones are not counted, equal ones once, and known ones not again"
    with closing(open_index(config(folder, "generation.max_tokens_total=400"))) as index:
        assert not index.left_out


def test_an_evaluation_keeps_the_problems_that_only_its_own_context_holds(folder: Path, counting: Counting) -> None:
    save_problems(folder.parent / "train.jsonl", problems("t", [20] * 18 + [250]))
    save_problems(folder.parent / "held_out.jsonl", problems("h", [20] * 18 + [250, 300]))
    longer, shorter = (
        config(folder, "evaluation.max_tokens_total=270"),
        config(folder, "evaluation.max_tokens_total=90"),
    )
    assert faults(longer) == []
    assert [one.problem_id for one in held_out_problems(longer)] == [f"h{n}" for n in range(19)]
    assert token_limits.left_out_lines(longer) == [
        "1 of 19 training problems are left out as too long: their prompts have 251 tokens, and"
        " generation.max_tokens_total is 200",
        "1 of 20 held-out problems are left out as too long: their prompts have 301 tokens, and"
        " evaluation.max_tokens_total is 270",
    ]
    save_problems(folder.parent / "held_out.jsonl", problems("h", [20] * 18 + [95]))
    assert faults(shorter) == [], "it is counted, though it fits in the context of the training"
    assert [one.problem_id for one in held_out_problems(shorter)] == [f"h{n}" for n in range(18)]


def test_a_prompt_is_too_long_from_the_limit_on(folder: Path, counting: Counting) -> None:
    save_problems(folder.parent / "train.jsonl", problems("t", [198, 199]))
    save_problems(folder.parent / "held_out.jsonl", problems("h", [20]))
    settings = config(folder, "problems.too_long_share=0.5")
    assert faults(settings) == []
    with closing(open_index(settings)) as index:
        assert dict(index.left_out) == {"t1": 200}, "199 characters and the token at the beginning leave no room"


@pytest.mark.parametrize(("train", "held_out", "key"), [(4, 0, "problems.train"), (0, 4, "problems.held_out")])
def test_too_many_long_prompts_refuse_the_run(
    folder: Path, counting: Counting, train: int, held_out: int, key: str
) -> None:
    save_problems(folder.parent / "train.jsonl", problems("t", [20] * 16 + [250] * train))
    save_problems(folder.parent / "held_out.jsonl", problems("h", [20] * 16 + [250] * held_out))
    (said,) = faults(config(folder))
    assert said.startswith(f"{key}: 4 of 20 ")
    assert "their prompts have 251 tokens, and generation.max_tokens_total is 200: raise it" in said
    assert faults(config(folder, "problems.too_long_share=0.2")) == []


def test_what_cannot_be_counted_is_a_fault_or_is_left_to_generation(folder: Path, counting: Counting) -> None:
    save_problems(folder.parent / "train.jsonl", problems("t", [250]))
    save_problems(folder.parent / "held_out.jsonl", problems("h", [20]))
    own = config(folder, "generation.environment.kind=entry_point", "generation.environment.entry_point=a:B")
    assert faults(own) == []
    assert counting.asked == [], "a class of the user writes its own prompts"
    (folder / "tokenizer.json").write_text("{}")
    (said,) = faults(config(folder))
    assert said.startswith("policy.path: the prompts cannot be written: ")


def test_short_prompts_need_no_tokenizer(folder: Path, counting: Counting) -> None:
    for name in ("train", "held_out"):
        save_problems(folder.parent / f"{name}.jsonl", problems(name, [20]))
    (folder / "tokenizer.json").write_text("{}")
    assert faults(config(folder)) == []
    assert counting.asked == []


@pytest.mark.heavy
def test_the_process_that_counts_is_a_process_of_its_own(folder: Path) -> None:
    save_problems(folder.parent / "train.jsonl", problems("t", [250]))
    save_problems(folder.parent / "held_out.jsonl", problems("h", [20]))
    with pytest.raises(ConfigError, match="1 of 1 training problems are too long"):
        preflight._raise(lambda: faults(config(folder)))
    assert prompt_lengths(config(folder)).tokens[digest_of(PromptText("1" * 250))] == 251
