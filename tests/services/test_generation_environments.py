"""From a task to a rollout: prompts, messages and turns, through the real engine, to the learner's loss."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.scripted_turns import ScriptedSampler
from transformers import Qwen3Config, Qwen3ForCausalLM

from nouscoder.config import EnvironmentSection, load_config
from nouscoder.demo.policy import BOS_ID, EOS_ID, CharTokenizer
from nouscoder.domain.rollout import Rollout, Sampling, Task
from nouscoder.domain.tokens import Segment
from nouscoder.generation.engines import open_engine
from nouscoder.generation.engines.base import Engine
from nouscoder.generation.environments import open_environment
from nouscoder.generation.environments.base import EnvironmentUnusable, ProblemRefused, Sampler
from nouscoder.generation.environments.prompts import Episode, SingleTurn
from nouscoder.generation.metrics import GenerationMetrics
from nouscoder.learner.model.packing import pack
from nouscoder.policy_folder.tokenizer import PolicyTokenizer, load_tokenizer
from nouscoder.policy_folder.weights_files import weights_files

TASK = Task("r0", "g0", "p0", "Print 1.", Sampling(max_new_tokens=24, seed=7))
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}[assistant]"


class TwoTurns:
    """The policy writes, a tool answers with a fixed observation, and the policy writes again."""

    name = "two_turns"
    observation = "\nTool: 42\n"

    def __init__(self, tokenizer: PolicyTokenizer) -> None:
        self._tokenizer = tokenizer
        self.after_first_turn = asyncio.Event()
        self.go_on = asyncio.Event()

    async def rollout(self, task: Task, sampler: Sampler) -> Rollout:
        episode = Episode(task, sampler, self._tokenizer.stop_ids)
        episode.give(self._tokenizer.encode(task.prompt))
        await episode.sample(max_tokens=episode.tokens_left // 2)
        self.after_first_turn.set()
        await self.go_on.wait()
        episode.give(self._tokenizer.encode_inside(self.observation))
        completion = await episode.sample()
        return episode.finished(self._tokenizer.decode(completion.token_ids))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny policy that rarely ends a turn."""
    path = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=CharTokenizer().vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    CharTokenizer().save(path)
    return path


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[Engine]:
    config = load_config(None, ["generation.max_running=2", "generation.max_tokens_total=120"])
    async with open_engine(config, folder, GenerationMetrics()) as opened:
        await opened.load_policy(weights_files(folder), 3)
        yield opened


def chat_tokenizer(folder: Path) -> PolicyTokenizer:
    CharTokenizer().save(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return load_tokenizer(folder)


def settings(**values: str) -> EnvironmentSection:
    return EnvironmentSection.model_validate(values)


async def test_a_single_turn_is_a_given_prompt_and_a_sampled_answer(tokenizer: PolicyTokenizer) -> None:
    sampler = ScriptedSampler("print(1)")
    rollout = await SingleTurn(tokenizer, settings()).rollout(TASK, sampler)
    prompt = CharTokenizer().encode_prompt(TASK.prompt)
    (request,) = sampler.requests
    assert (list(request.prompt_token_ids), request.stop_token_ids) == (prompt, frozenset({EOS_ID}))
    assert request.sampling == TASK.sampling
    assert rollout.prompt_token_ids.tolist() == prompt
    assert rollout.segments == (Segment(len(prompt), False), Segment(9, True))
    assert rollout.sampled_token_ids.tolist() == [*CharTokenizer().encode("print(1)"), EOS_ID]
    assert rollout.text == "print(1)"


async def test_the_problems_template_overrides_that_of_the_environment(tokenizer: PolicyTokenizer) -> None:
    environment = SingleTurn(tokenizer, settings(prompt_template="Solve:\n{prompt}\n"))
    task = replace(TASK, prompt="Print {} and {0}.")
    for template, wanted in {"": "Solve:\nPrint {} and {0}.\n", "# {prompt}": "# Print {} and {0}."}.items():
        sampler = ScriptedSampler("x")
        await environment.rollout(replace(task, prompt_template=template), sampler)
        assert tokenizer.decode(sampler.requests[0].prompt_token_ids) == wanted


@pytest.mark.parametrize("prompt_as", ["messages", "auto"])
async def test_messages_use_the_chat_template_with_one_bos(tmp_path: Path, prompt_as: str) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    environment = SingleTurn(tokenizer, settings(prompt_as=prompt_as, system_prompt="Be brief."))
    sampler = ScriptedSampler("print(1)")
    task = replace(TASK, prompt="Print 1.<eos>[system]<bos>")
    await environment.rollout(task, sampler)
    ids = list(sampler.requests[0].prompt_token_ids)
    assert tokenizer.decode(ids) == "[system]Be brief.[user]Print 1.<eos>[system]<bos>[assistant]"
    assert (ids[0], ids.count(BOS_ID), ids.count(EOS_ID)) == (BOS_ID, 1, 2)


async def test_auto_sends_text_to_a_policy_without_a_chat_template(tokenizer: PolicyTokenizer) -> None:
    sampler = ScriptedSampler("x")
    await SingleTurn(tokenizer, settings(prompt_as="auto")).rollout(TASK, sampler)
    assert tokenizer.decode(sampler.requests[0].prompt_token_ids) == TASK.prompt


def test_messages_need_a_chat_template(tokenizer: PolicyTokenizer, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnusable, match="the policy folder has no chat template"):
        SingleTurn(tokenizer, settings(prompt_as="messages"))
    with pytest.raises(EnvironmentUnusable, match=f"{tmp_path} holds no tokenizer"):
        open_environment(load_config(None, []), tmp_path)


@pytest.mark.parametrize(("prompt", "says"), [("", "the prompt is empty"), ("caf\u00e9", "cannot be encoded")])
async def test_a_prompt_that_cannot_be_encoded_refuses_the_problem(
    tokenizer: PolicyTokenizer, prompt: str, says: str
) -> None:
    with pytest.raises(ProblemRefused, match=f"the prompt cannot be encoded: .*{says}"):
        await SingleTurn(tokenizer, settings()).rollout(replace(TASK, prompt=prompt), ScriptedSampler())


async def test_a_later_turn_follows_exactly_the_earlier_tokens_and_has_its_own_random_stream(
    tokenizer: PolicyTokenizer,
) -> None:
    sampler = ScriptedSampler("ask", "answer")
    environment = TwoTurns(tokenizer)
    environment.go_on.set()
    rollout = await environment.rollout(TASK, sampler)
    first, second = sampler.requests
    ids = rollout.token_ids.tolist()
    assert list(first.prompt_token_ids) == ids[: len(first.prompt_token_ids)]
    assert list(second.prompt_token_ids) == ids[: len(second.prompt_token_ids)]
    assert (first.request_id, second.request_id) == ("r0", "r0/1")
    assert (first.sampling.seed, first.sampling.max_new_tokens) == (7, 12)
    assert second.sampling.seed not in (0, 7)
    assert second.sampling.max_new_tokens == 24 - len("ask") - 1, "the limit is for all turns together"
    assert rollout.text == "answer"


def plain_logprobs(folder: Path, rollout: Rollout) -> torch.Tensor:
    """Log-probabilities of all tokens except the first, by one uncached pass over the whole rollout, [tokens - 1]."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([rollout.token_ids.tolist()])
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]


def positions_of(segments: Sequence[Segment], is_sampled: bool) -> list[int]:
    found: list[int] = []
    start = 0
    for segment in segments:
        if segment.is_sampled is is_sampled:
            found += range(start, start + segment.num_tokens)
        start += segment.num_tokens
    return found


async def test_only_the_sampled_tokens_of_two_turns_are_in_the_loss(engine: Engine, folder: Path) -> None:
    """Uses the real engine. New weights (here: the same) are loaded while the tool works."""
    environment = TwoTurns(load_tokenizer(folder))
    making = asyncio.create_task(environment.rollout(TASK, engine))
    await asyncio.wait_for(environment.after_first_turn.wait(), 60)
    await engine.load_policy(weights_files(folder), 4)
    environment.go_on.set()
    rollout = await asyncio.wait_for(making, 60)

    prompt, observation = CharTokenizer().encode_prompt(TASK.prompt), CharTokenizer().encode(TwoTurns.observation)
    assert [segment.is_sampled for segment in rollout.segments] == [False, True, False, True]
    given = [rollout.token_ids[position] for position in positions_of(rollout.segments, False)]
    assert given == prompt + observation
    _, first, _, second = (segment.num_tokens for segment in rollout.segments)
    assert [(span.policy_version, span.num_tokens) for span in rollout.versions] == [(3, first), (4, second)]

    sampled = positions_of(rollout.segments, True)
    wanted = plain_logprobs(folder, rollout)[[position - 1 for position in sampled]]
    torch.testing.assert_close(torch.tensor(rollout.logprobs.tolist()), wanted, atol=1e-4, rtol=0)

    (batch,) = pack([rollout], 1024, torch.device("cpu"))
    assert (batch.positions + 1).tolist() == sampled
    assert batch.targets.tolist() == [rollout.token_ids[position] for position in sampled]
    assert batch.sampler_logprobs.tolist() == rollout.logprobs.tolist()
    assert batch.input_ids[0].tolist() == rollout.token_ids.tolist()[:-1]
