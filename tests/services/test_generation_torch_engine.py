"""The torch engine compared with a plain forward pass of the model, and its sampling with its distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.contract.reference_logprobs import fresh_logprobs, replayed_logprobs
from transformers import Qwen3Config, Qwen3ForCausalLM

from nouscoder.demo.policy import EOS_ID, CharTokenizer
from nouscoder.domain.rollout import Rollout, Sampling, Task, assemble_rollout
from nouscoder.domain.tokens import Completion, FinishReason, VersionSpan, int32
from nouscoder.generation.engines.base import EngineError, SampleRequest
from nouscoder.generation.engines.decoder import SLOTS_ATTENTION
from nouscoder.generation.engines.kv_cache import DecodePass, KeyValueCache, PromptPass
from nouscoder.generation.engines.token_choice import choose_tokens, draws_of
from nouscoder.generation.engines.torch import TorchEngine
from nouscoder.policy_folder.weights_files import weights_files

NUM_SLOTS, CAPACITY = 6, 48

# The tensors are tiny, so more threads would only wait for each other.
torch.set_num_threads(1)


def tiny_model(seed: int = 0, **changes: object) -> Any:
    settings: dict[str, object] = {
        "vocab_size": CharTokenizer().vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
    }
    torch.manual_seed(seed)
    config: Any = Qwen3Config(**(settings | changes))  # type: ignore[arg-type]
    return Qwen3ForCausalLM(config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy folder whose logits are far from uniform, so that a wrong cache is detected."""
    path = tmp_path_factory.mktemp("policy")
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.mul_(20)
            layer.self_attn.q_proj.weight.mul_(20)
    model.save_pretrained(path)
    CharTokenizer().save(path)
    return path


@pytest.fixture
def engine(folder: Path) -> TorchEngine:
    made = TorchEngine(folder, max_running=NUM_SLOTS, max_tokens_total=CAPACITY)
    made.load_policy(weights_files(folder), 0)
    return made


def task(number: int, prompt: str = "", **sampling: float) -> Task:
    chosen = replace(Sampling(max_new_tokens=12, seed=number + 1), **sampling)  # type: ignore[arg-type]
    return Task(f"r{number}", f"g{number}", "p", prompt or f"prompt {'x' * (3 * number % 17)}{number}", chosen)


def request_of(each: Task) -> SampleRequest:
    prompt = CharTokenizer().encode_prompt(each.prompt)
    return SampleRequest(each.rollout_id, prompt, each.sampling, frozenset({EOS_ID}))


def run(
    engine: TorchEngine, tasks: list[Task], at_step: Callable[[int], None] = lambda step: None
) -> dict[str, Rollout]:
    by_id = {each.rollout_id: each for each in tasks}
    for each in tasks:
        engine.add(request_of(each))
    done: dict[str, Rollout] = {}
    for step in range(2000):
        if not engine.num_running and not engine.num_waiting:
            return done
        at_step(step)
        for request_id, completion in engine.step():
            assert request_id not in done
            each = by_id[request_id]
            text = CharTokenizer().decode(completion.token_ids)
            done[request_id] = assemble_rollout(each, [int32(request_of(each).prompt_token_ids), completion], text)
    raise AssertionError("the engine does not come to an end")


def plain_logprobs(
    folder: Path, rollout: Rollout, temperature: float = 1.0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Log-probabilities of the rollout's tokens by one uncached forward pass over the whole rollout."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype)
    ids = torch.tensor([rollout.token_ids.tolist()])
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0].float() / temperature
    start = len(rollout.prompt_token_ids) - 1
    sampled = torch.tensor(rollout.sampled_token_ids.tolist())
    return torch.log_softmax(logits, -1)[start:-1].gather(1, sampled[:, None])[:, 0]


def sampled_logprobs(rollout: Rollout) -> torch.Tensor:
    """The log-probabilities that the engine recorded, [sampled tokens]."""
    return torch.tensor(rollout.logprobs.tolist())


def test_cache_gives_the_logits_of_a_plain_forward_pass_while_rows_join_and_leave() -> None:
    model = tiny_model(attn_implementation=SLOTS_ATTENTION)
    random = torch.Generator().manual_seed(5)
    sequences = [torch.randint(3, 90, (length,), generator=random) for length in (30, 22, 35, 18)]
    starts = [4, 9, 2, 13]
    with torch.inference_mode():
        plain = tiny_model()
        wanted = [plain(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences]
        cache = KeyValueCache(4, CAPACITY)

        def join(slot: int, which: int) -> None:
            ids = sequences[which][: starts[which]]
            passing = PromptPass(cache, slot, torch.tensor([0]))
            positions = torch.arange(len(ids))[None]
            model(ids[None], position_ids=positions, past_key_values=passing, use_cache=False)

        def decode(slots: list[int], lengths: list[int]) -> None:
            columns, longest = torch.tensor(lengths), max(lengths) + 1
            tokens = torch.stack([sequences[which][at] for which, at in zip(slots, lengths, strict=True)])[:, None]
            passing = DecodePass(cache, columns, longest)
            output = model(tokens, position_ids=columns[:, None], past_key_values=passing, use_cache=False)
            logits = output.logits[:, 0]
            for row, (which, at) in enumerate(zip(slots, lengths, strict=True)):
                torch.testing.assert_close(logits[row], wanted[which][at], atol=1e-4, rtol=0)

        for which in range(3):
            join(which, which)
        decode([0, 1, 2], [4, 9, 2])
        decode([0, 1, 2], [5, 10, 3])
        # Sequence 0 leaves, the last one moves into its slot, and sequence 3 joins behind.
        cache.move(2, 0, 4)
        join(2, 3)
        for step in range(5):
            decode([2, 1, 3], [4 + step, 11 + step, 13 + step])


def test_logprobs_equal_those_of_a_plain_forward_pass(engine: TorchEngine, folder: Path) -> None:
    """24 rollouts with different prompts and lengths in 6 slots, so that rows join, leave and move often."""
    rollouts = run(engine, [task(n, max_new_tokens=5 + 7 * n % 23) for n in range(24)])
    assert len(rollouts) == 24
    assert len({rollout.num_sampled_tokens for rollout in rollouts.values()}) > 5
    for rollout in rollouts.values():
        torch.testing.assert_close(sampled_logprobs(rollout), plain_logprobs(folder, rollout), atol=1e-4, rtol=0)


def test_in_bfloat16_the_logprobs_are_those_of_a_forward_pass_in_bfloat16(folder: Path) -> None:
    engine = TorchEngine(folder, max_running=NUM_SLOTS, max_tokens_total=CAPACITY, dtype="bfloat16")
    engine.load_policy(weights_files(folder), 0)
    rollouts = run(engine, [task(number) for number in range(8)])
    found = torch.cat([sampled_logprobs(each) for each in rollouts.values()])
    plain = {
        dtype: torch.cat([plain_logprobs(folder, each, dtype=dtype) for each in rollouts.values()])
        for dtype in (torch.bfloat16, torch.float32)
    }
    distance = {dtype: float((found - wanted).abs().mean()) for dtype, wanted in plain.items()}
    assert distance[torch.bfloat16] < distance[torch.float32] < 0.1
    assert distance[torch.float32] > 1e-3, "it computes in bfloat16"


def test_tokens_depend_on_weights_prompt_and_seed_not_on_other_requests(engine: TorchEngine, folder: Path) -> None:
    tasks = [task(n) for n in range(10)]
    together = run(engine, tasks)
    for each in tasks:
        assert run(engine, [each])[each.rollout_id].token_ids == together[each.rollout_id].token_ids
    other = run(engine, [replace(tasks[0], sampling=Sampling(max_new_tokens=12, seed=999))])["r0"]
    assert other.token_ids != together["r0"].token_ids


def test_rollouts_of_one_prompt_share_its_pass_and_differ_by_their_seed(engine: TorchEngine, folder: Path) -> None:
    rollouts = run(engine, [task(n, prompt="the same for all") for n in range(6)])
    assert len({bytes(rollout.token_ids) for rollout in rollouts.values()}) == 6
    for rollout in rollouts.values():
        torch.testing.assert_close(sampled_logprobs(rollout), plain_logprobs(folder, rollout), atol=1e-4, rtol=0)


def test_temperature_0_selects_the_most_likely_token(engine: TorchEngine, folder: Path) -> None:
    rollout = run(engine, [task(0, temperature=0.0, max_new_tokens=8), task(1)])["r0"]
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([rollout.token_ids.tolist()])
    with torch.inference_mode():
        likeliest = model(input_ids=ids, use_cache=False).logits[0].argmax(-1)
    assert rollout.sampled_token_ids.tolist() == likeliest[len(rollout.prompt_token_ids) - 1 : -1].tolist()


def test_logprob_is_at_the_sampling_temperature_and_before_top_p(engine: TorchEngine, folder: Path) -> None:
    rollouts = run(engine, [task(n, temperature=0.7, top_p=0.5) for n in range(3)])
    for rollout in rollouts.values():
        wanted = plain_logprobs(folder, rollout, temperature=0.7)
        torch.testing.assert_close(sampled_logprobs(rollout), wanted, atol=1e-4, rtol=0)


def test_new_weights_reach_running_rollouts_between_two_steps(
    engine: TorchEngine, folder: Path, tmp_path: Path
) -> None:
    """Tokens after the swap have the probabilities of the new weights with the cache of the old ones."""
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].flip(0).contiguous()
    save_file(weights, tmp_path / "new.safetensors")

    def swap(step: int) -> None:
        if step == 4:
            engine.load_policy([tmp_path / "new.safetensors"], 1)

    rollout = run(engine, [task(0, max_new_tokens=10, prompt="swap")], swap)["r0"]
    assert rollout.versions == (VersionSpan(0, 4), VersionSpan(1, 6))
    # Only the output layer changed, so a plain pass of the new policy gives the later log-probabilities.
    old = plain_logprobs(folder, rollout)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    new = plain_logprobs(tmp_path, rollout)
    torch.testing.assert_close(sampled_logprobs(rollout), torch.cat([old[:4], new[4:]]), atol=1e-4, rtol=0)
    assert (old[4:] - new[4:]).abs().max() > 0.1


def test_logprobs_after_three_updates_are_those_of_a_replay_with_the_kept_keys_and_values(
    random_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Rows join, leave and move meanwhile. A fresh forward pass differs, because it has other keys and values."""
    folders = {version: random_policy(tmp_path / str(version), seed=version) for version in range(4)}
    engine = TorchEngine(folders[0], max_running=NUM_SLOTS, max_tokens_total=CAPACITY)
    engine.load_policy(weights_files(folders[0]), 0)
    requests = {
        f"r{number}": SampleRequest(
            f"r{number}", (1, 5 + number, 9), Sampling(max_new_tokens=12 + number % 20, seed=number + 1), frozenset()
        )
        for number in range(12)
    }
    for request in requests.values():
        engine.add(request)
    completions: dict[str, Completion] = {}
    for step in range(200):
        if step in (4, 9, 13):
            version = (4, 9, 13).index(step) + 1
            engine.load_policy(weights_files(folders[version]), version)
        completions |= dict(engine.step())
    assert completions.keys() == requests.keys()
    assert any(len(completion.versions) == 4 for completion in completions.values())
    largest_from_fresh = 0.0
    for name, completion in completions.items():
        sampled = torch.tensor(list(completion.logprobs))
        replayed = replayed_logprobs(folders, requests[name], completion)
        torch.testing.assert_close(sampled, replayed, atol=1e-4, rtol=0)
        last = completion.versions[-1]
        fresh = fresh_logprobs(folders[last.policy_version], requests[name], completion)
        differences = (fresh - sampled).abs()[-last.num_tokens :]
        largest_from_fresh = max(largest_from_fresh, float(differences.max()))
    assert largest_from_fresh > 0.01


def broken(weights: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    name = "model.layers.1.mlp.up_proj.weight"
    changed = {
        "missing": {key: value for key, value in weights.items() if key != name},
        "unknown": weights | {"extra.weight": torch.zeros(2)},
        "shape": weights | {name: torch.zeros(3, 3)},
        "finite": weights | {name: torch.full_like(weights[name], float("nan"))},
    }
    return changed[how]


@pytest.mark.parametrize(
    ("how", "says"),
    [("missing", "is missing"), ("unknown", "not a parameter"), ("shape", "has shape"), ("finite", "not finite")],
)
def test_weights_that_do_not_fit_are_refused_and_change_nothing(
    engine: TorchEngine, folder: Path, tmp_path: Path, how: str, says: str
) -> None:
    before = run(engine, [task(0)])["r0"]
    weights = {name: value * 2 for name, value in load_file(folder / "model.safetensors").items()}
    save_file(broken(weights, how), tmp_path / "bad.safetensors")
    with pytest.raises(EngineError, match=says):
        engine.load_policy([tmp_path / "bad.safetensors"], 1)
    assert run(engine, [task(0)])["r0"] == before


def test_tied_output_layer_is_saved_once_and_loads(tmp_path: Path) -> None:
    tiny_model(tie_word_embeddings=True).save_pretrained(tmp_path)
    CharTokenizer().save(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    tied = TorchEngine(tmp_path, max_running=2, max_tokens_total=CAPACITY)
    tied.load_policy(weights_files(tmp_path), 0)
    rollout = run(tied, [task(0)])["r0"]
    torch.testing.assert_close(sampled_logprobs(rollout), plain_logprobs(tmp_path, rollout), atol=1e-4, rtol=0)


def test_weights_in_shards_load_like_one_file(engine: TorchEngine, folder: Path, tmp_path: Path) -> None:
    before = run(engine, [task(0)])["r0"]
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    shards = weights_files(tmp_path)
    assert len(shards) > 2
    with pytest.raises(EngineError, match="is missing"):
        engine.load_policy(shards[1:], 1)
    with pytest.raises(EngineError, match="is in another shard too"):
        engine.load_policy([*shards, folder / "model.safetensors"], 1)
    engine.load_policy(shards, 0)
    assert run(engine, [task(0)])["r0"] == before


def test_logits_that_are_nan_raise(engine: TorchEngine, folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= 3e38 / weights["lm_head.weight"].abs().max()
    save_file(weights, tmp_path / "overflowing.safetensors")
    engine.load_policy([tmp_path / "overflowing.safetensors"], 7)
    engine.add(request_of(task(0)))
    with pytest.raises(EngineError, match=r"policy version 7 gave request r0 logits that are NaN"):
        engine.step()


def test_a_stop_token_ends_a_rollout_and_is_a_sampled_token(folder: Path, tmp_path: Path) -> None:
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.zero_()  # all logits are 0, so all tokens are equally likely
    model.save_pretrained(tmp_path)
    CharTokenizer().save(tmp_path)
    flat = TorchEngine(tmp_path, max_running=NUM_SLOTS, max_tokens_total=CAPACITY)
    flat.load_policy(weights_files(tmp_path), 0)
    rollouts = list(run(flat, [task(n, max_new_tokens=30) for n in range(200)]).values())
    stopped = [rollout for rollout in rollouts if rollout.finish_reason is FinishReason.STOP]
    # 1 - (98/99)^n of rollouts of n tokens stop: between 15% and 30% for the n of these prompts.
    assert 20 <= len(stopped) <= 70
    for rollout in rollouts:
        at_end = rollout.token_ids[-1] == 2
        assert at_end == (rollout.finish_reason is FinishReason.STOP)
        assert 2 not in rollout.sampled_token_ids[:-1]
        assert rollout.text == CharTokenizer().decode(rollout.sampled_token_ids)
        assert [segment.is_sampled for segment in rollout.segments] == [False, True]


def test_sampled_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1e9]]).expand(20000, 4)
    draws = draws_of(request_of(task(3)), 20000)
    choice = choose_tokens(logits, draws, torch.ones(20000), None)
    shares = torch.bincount(choice.token_ids, minlength=4) / 20000
    torch.testing.assert_close(shares, torch.softmax(logits[0], -1), atol=0.012, rtol=0)


def test_extreme_draws_select_only_possible_tokens() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]]).expand(2, 4)
    choice = choose_tokens(logits, torch.tensor([2.0**-53, 1.0], dtype=torch.float64), torch.ones(2), None)
    assert choice.token_ids.tolist() == [1, 2]


def test_a_temperature_near_zero_takes_the_likeliest_token_and_overflows_nothing() -> None:
    """One such request would otherwise end the engine with logits that are NaN."""
    logits = torch.tensor([[5.0, -3.0, 80.0], [1.0, 0.5, 0.0]])
    draws = torch.tensor([0.5, 0.5], dtype=torch.float64)
    for temperature in (2e-38, 1e-30, 1e-7):
        choice = choose_tokens(logits, draws, torch.full((2,), temperature), None)
        assert choice.token_ids.tolist() == [2, 0]
        assert choice.logprobs.tolist() == [0.0, 0.0]


def test_passes_take_the_keyword_arguments_of_newer_models() -> None:
    """From transformers 5.24 on, attention gives `update` its own keyword arguments (pyproject.toml allows it)."""
    cache = KeyValueCache(2, CAPACITY)
    keys, values = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4)
    PromptPass(cache, 0, torch.tensor([0])).update(keys, values, 0, kwargs={"use_cache": False})
    one = DecodePass(cache, torch.tensor([3]), 4).update(
        keys[:, :, :1], values[:, :, :1], 0, kwargs={"use_cache": False}
    )
    assert [tuple(stored.shape) for stored in one] == [(1, 2, 4, 4)] * 2
