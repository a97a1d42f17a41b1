"""generation.sampling: top_k, min_p, stop and stop_token_ids, with log-probabilities that stay those of the policy."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from nouscoder.config import Config, ConfigError, load_config
from nouscoder.demo.policy import EOS_ID, CharTokenizer
from nouscoder.domain.partial import PartialRollout
from nouscoder.domain.rollout import Sampling, Task
from nouscoder.domain.tokens import Completion, FinishReason
from nouscoder.generation.engines.base import SampleRequest, StopTexts
from nouscoder.generation.engines.token_choice import Truncation, choose_tokens, draws_of
from nouscoder.generation.engines.torch import TorchEngine
from nouscoder.generation.environments.base import EnvironmentUnusable
from nouscoder.generation.environments.prompts import Episode, Prompts
from nouscoder.generation.partials import ResumableSampler
from nouscoder.generation.rollouts import RunSampling
from nouscoder.policy_folder.tokenizer import load_tokenizer
from nouscoder.policy_folder.weights_files import weights_files

TEXT = CharTokenizer()
PROMPT = tuple(TEXT.encode_prompt("def"))
SHARES = torch.tensor([0.5, 0.3, 0.15, 0.05])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    sizes: Any = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    heads: Any = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    torch.manual_seed(0)
    config: Any = Qwen3Config(vocab_size=TEXT.vocab_size, **sizes, **heads, tie_word_embeddings=False)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(40)
    model.save_pretrained(path)
    TEXT.save(path)
    return path


@pytest.fixture
def engine(folder: Path) -> TorchEngine:
    made = TorchEngine(folder, max_running=4, max_tokens_total=100)
    made.load_policy(weights_files(folder), 0)
    return made


def request_of(number: int = 1, **more: Any) -> SampleRequest:
    return SampleRequest(f"r{number}", PROMPT, Sampling(max_new_tokens=24, seed=number), frozenset(), **more)


def completions(engine: TorchEngine, requests: Sequence[SampleRequest]) -> list[Completion]:
    for request in requests:
        engine.add(request)
    done: dict[str, Completion] = {}
    while len(done) < len(requests):
        done |= dict(engine.step())
    return [done[request.request_id] for request in requests]


def policy_logprobs(folder: Path, completion: Completion) -> torch.Tensor:
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[*PROMPT, *completion.token_ids]])
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0].log_softmax(-1)[len(PROMPT) - 1 : -1]
    found: torch.Tensor = logprobs.gather(1, torch.tensor(completion.token_ids.tolist())[:, None])[:, 0]
    return found


CANDIDATES = [
    *[(0.49, 0, 0, 1), (0.51, 0, 0, 2), (0.79, 0, 0, 2), (0.81, 0, 0, 3), (1, 0, 0, 4)],
    *[(1, 1, 0, 1), (1, 3, 0, 3), (1, 9, 0, 4), (1, 0, 0.2, 3), (1, 0, 1, 1), (1, 2, 0.05, 2), (0.6, 2, 0, 1)],
]


@pytest.mark.parametrize(("top_p", "top_k", "min_p", "num_kept"), CANDIDATES)
def test_the_candidates_are_those_of_the_keys_row_by_row(top_p: float, top_k: int, min_p: float, num_kept: int) -> None:
    """Every second row is not truncated. Top-p counts the share among those that top-k leaves."""
    rows = 4000
    truncation = Truncation(
        torch.tensor([top_p, 1.0], dtype=torch.float64).repeat(rows),
        torch.tensor([top_k, 0]).repeat(rows),
        torch.tensor([min_p, 0.0], dtype=torch.float64).repeat(rows),
    )
    draws = draws_of(request_of(), 2 * rows)
    choice = choose_tokens(SHARES.log().expand(2 * rows, 4), draws, torch.ones(2 * rows), truncation)
    found = torch.bincount(choice.token_ids[0::2], minlength=4) / rows
    wanted = torch.where(torch.arange(4) < num_kept, SHARES, 0.0)
    torch.testing.assert_close(found, wanted / wanted.sum(), atol=0.03, rtol=0)
    assert found[num_kept:].tolist() == [0.0] * (4 - num_kept)
    assert torch.bincount(choice.token_ids[1::2], minlength=4)[3] > 0
    torch.testing.assert_close(choice.logprobs.exp(), SHARES[choice.token_ids])


@pytest.mark.parametrize("keys", [{"top_k": 2}, {"min_p": 0.3}, {"top_k": 3, "min_p": 0.1}])
def test_logprobs_are_those_of_the_policy_so_the_learner_finds_no_mismatch(
    engine: TorchEngine, folder: Path, keys: dict[str, Any]
) -> None:
    truncated, plain = completions(engine, [request_of(1, **keys), replace(request_of(1), request_id="plain")])
    assert truncated.token_ids.tolist() != plain.token_ids.tolist(), "the key changes what is sampled"
    torch.testing.assert_close(
        torch.tensor(truncated.logprobs.tolist()), policy_logprobs(folder, truncated), atol=1e-4, rtol=0
    )


def test_a_stop_text_ends_a_completion_at_the_token_that_completes_it(engine: TorchEngine) -> None:
    (plain,) = completions(engine, [request_of()])
    whole = TEXT.decode(plain.token_ids)
    stop = whole[9:12]
    end = whole.index(stop) + len(stop)
    stops = StopTexts([stop, "never in it"], TEXT.decode)
    (ended,) = completions(engine, [request_of(stops=stops)])
    assert ended.finish_reason is FinishReason.STOP
    assert TEXT.decode(ended.token_ids) == whole[:end]
    assert ended.logprobs.tolist() == plain.logprobs.tolist()[: len(ended.token_ids)]

    num_kept = len(ended.token_ids) - 1
    rest = replace(
        request_of(stops=stops),
        prompt_token_ids=(*PROMPT, *ended.token_ids.tolist()[:num_kept]),
        num_kept=num_kept,
        sampling=replace(request_of().sampling, max_new_tokens=24 - num_kept),
    )
    (rest_of_it,) = completions(engine, [rest])
    assert rest_of_it.token_ids.tolist() == ended.token_ids.tolist()[num_kept:], "its beginning is among kept tokens"
    assert rest_of_it.finish_reason is FinishReason.STOP


class OneAnswer:
    """Records the request, and answers as the test says."""

    def __init__(self, answer: Sequence[int]) -> None:
        self.answer = answer
        self.requests: list[SampleRequest] = []

    def sample(self, request: SampleRequest) -> asyncio.Future[Completion]:
        self.requests.append(request)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        future.set_result(completion_of(self.answer))
        return future


def completion_of(ids: Sequence[int]) -> Completion:
    from nouscoder.sft.rollouts import written

    return written(ids)


def sampling_of(folder: Path, *keys: str) -> RunSampling:
    return RunSampling.of(config_of(*keys).generation.sampling, folder)


def config_of(*keys: str) -> Config:
    return load_config(None, [f"generation.sampling.{key}" for key in keys])


async def test_the_keys_of_a_run_reach_every_request_and_a_stop_text_stays_in_the_answer(folder: Path) -> None:
    run = sampling_of(folder, "top_k=5", "min_p=0.1", 'stop=["b\\n"]', "stop_token_ids=[7]")
    engine = OneAnswer(TEXT.encode("a = b\n"))
    tokenizer = load_tokenizer(folder)
    prompts = Prompts(tokenizer, config_of().generation.environment)
    task = Task("r", "g", "p", "Print.", Sampling(seed=1))
    episode = prompts.begin(task, run.added_to(ResumableSampler(engine)))
    answer = await episode.sample()
    (request,) = engine.requests
    assert (request.top_k, request.min_p, request.stop_token_ids) == (5, 0.1, frozenset({EOS_ID, 7}))
    assert request.is_ended(TEXT.encode("a = b\n"))
    assert not request.is_ended(TEXT.encode("a = b"))
    assert prompts.text_of(answer) == "a = b\n"
    assert prompts.text_of(completion_of([*TEXT.encode("a"), EOS_ID])) == "a"
    assert RunSampling().added_to(engine) is engine


async def test_a_kept_turn_that_ended_with_a_stop_text_is_not_sampled_on(folder: Path) -> None:
    run = sampling_of(folder, 'stop=["b\\n"]')
    engine = OneAnswer(TEXT.encode("never"))
    first = ResumableSampler(OneAnswer(TEXT.encode("a = b\n")))
    task = Task("r", "g", "p", "x", Sampling(seed=1))
    episode = Episode(task, run.added_to(first), frozenset({EOS_ID}))
    episode.give(list(PROMPT))
    await episode.sample()
    kept = first.unsaved(None)
    assert isinstance(kept, PartialRollout)
    again = Episode(task, run.added_to(ResumableSampler(engine, kept)), frozenset({EOS_ID}))
    again.give(list(PROMPT))
    answer = await again.sample()
    assert (answer.token_ids.tolist(), answer.finish_reason) == (TEXT.encode("a = b\n"), FinishReason.STOP)
    assert engine.requests == []


def test_a_token_that_the_policy_has_not_is_refused(folder: Path) -> None:
    with pytest.raises(EnvironmentUnusable, match=r"generation\.sampling\.stop_token_ids: 5000 is not a token"):
        sampling_of(folder, "stop_token_ids=[5000]")


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("top_k=5", r"generation\.sampling\.top_k must be 0 for training with the vllm engine"),
        ("min_p=0.1", r"generation\.sampling\.min_p must be 0 for training with the vllm engine"),
        ('stop=["x"]', r"generation\.sampling\.stop needs generation\.engine torch"),
    ],
)
def test_what_vllm_cannot_report_or_do_is_refused(key: str, sentence: str) -> None:
    config_of(key)
    with pytest.raises(ConfigError, match=sentence):
        load_config(None, ["generation.engine=vllm", f"generation.sampling.{key}"])
    load_config(None, ["generation.engine=vllm", "generation.sampling.stop_token_ids=[7]"])
    with pytest.raises(ConfigError, match="stop"):
        config_of('stop=[""]')
