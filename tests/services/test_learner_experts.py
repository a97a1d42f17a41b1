"""Policies with experts (Qwen3-MoE): trained, sampled, published, and trained with the experts of generation."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tests.policies_with_experts import random_policy_with_experts, with_random_experts
from torch import Tensor
from transformers import AutoModelForCausalLM

from nouscoder.config import Config, ConfigError, LearnerSection, PolicySection, load_config
from nouscoder.config.learner import ActivationCheckpointing
from nouscoder.domain.batch import Batch, GradedRollout
from nouscoder.domain.partial import PartialRollout, tokens_from
from nouscoder.domain.rollout import Rollout, Sampling, Task, assemble_rollout
from nouscoder.domain.tokens import Completion, ExpertChoices, int32
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.generation.engines.base import EngineError, EngineUnusable, SampleRequest
from nouscoder.generation.engines.stepped import SteppedEngine
from nouscoder.generation.engines.torch import TorchEngine
from nouscoder.generation.metrics import GenerationMetrics
from nouscoder.generation.partials import ResumableSampler
from nouscoder.learner.model.decoder_layers import checkpoint_activations
from nouscoder.learner.model.experts import replay_experts
from nouscoder.learner.model.logprobs import score_tokens
from nouscoder.learner.model.packing import MicroBatch, pack_row
from nouscoder.learner.model.synthetic import random_batch, random_policy, write_policy_folder
from nouscoder.learner.model.weights import load_model, stored_dtypes
from nouscoder.learner.parallel.operations import active_parameters
from nouscoder.learner.publication.publisher import PolicyPublisher, StagedPolicy
from nouscoder.learner.trainer import Trainer
from nouscoder.objectives.advantage import AdvantageSection, Overlong
from nouscoder.policy_folder.policy_tensors import merge_experts, routers_of, split_experts
from nouscoder.policy_folder.weights_files import weights_files
from nouscoder.store.pieces import decode_pieces, encode_piece
from nouscoder.store.rollout_record import decode_rollout, encode_rollout

CPU = torch.device("cpu")
PROMPTS = ((5, 9, 30), (7,), (5, 9, 30, 11, 40, 8))
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("experts")
    write_policy_folder(made, random_policy_with_experts(0))
    return made


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the same architecture."""
    made = tmp_path_factory.mktemp("another")
    write_policy_folder(made, random_policy_with_experts(1))
    return made


def engine_of(folder: Path) -> TorchEngine:
    engine = TorchEngine(folder, max_running=2, max_tokens_total=64, records_experts=True)
    engine.load_policy(weights_files(folder), 0)
    return engine


def completions(engine: TorchEngine) -> list[Completion]:
    """One for each prompt, two at a time."""
    for number, prompt in enumerate(PROMPTS):
        sampling = Sampling(max_new_tokens=NUM_TOKENS - number, seed=number + 1)
        engine.add(SampleRequest(f"r{number}", prompt, sampling, frozenset()))
    return drained(engine)


def drained(engine: TorchEngine) -> list[Completion]:
    ended: dict[str, Completion] = {}
    while engine.num_running or engine.num_waiting:
        ended |= dict(engine.step())
    return [ended[name] for name in sorted(ended)]


def array_of(experts: ExpertChoices | None) -> np.ndarray[Any, Any]:
    assert experts is not None
    return np.frombuffer(experts.ids, np.uint8).reshape(-1, experts.num_layers, experts.top_k)


def chosen_by_transformers(folder: Path, ids: Sequence[int]) -> np.ndarray[Any, Any]:
    """The experts of each token in a plain forward pass, [tokens, layers, top_k], sorted."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    chosen: np.ndarray[Any, Any] = torch.stack([one.topk(2).indices for one in logits], dim=1).sort(-1).values.numpy()
    return chosen


def rollouts_of(found: Sequence[Completion]) -> list[Rollout]:
    return [
        assemble_rollout(Task(f"g-{number}", "g", "p", "", Sampling()), [int32(prompt), completion], "")
        for number, (prompt, completion) in enumerate(zip(PROMPTS, found, strict=True))
    ]


def row_of(rollouts: Sequence[Rollout], *, replays_experts: bool) -> MicroBatch:
    return pack_row(rollouts, range(len(rollouts)), CPU, replays_experts=replays_experts)


def replaying(folder: Path) -> Any:
    model = load_model(folder)
    replay_experts(model)
    return model


def batch_of(rollouts: Sequence[Rollout]) -> Batch:
    """One group with both rewards."""
    kinds = [VerdictKind.ACCEPTED, VerdictKind.WRONG_ANSWER, VerdictKind.WRONG_ANSWER]
    graded = [
        GradedRollout(
            rollout, Verdict(kind, int(kind is kinds[0]), 1, 1, 0.0, "test"), 1.0 if kind is kinds[0] else -1.0
        )
        for rollout, kind in zip(rollouts, kinds, strict=True)
    ]
    return Batch(0, tuple(graded), 0)


def test_generation_records_the_experts_of_every_token_that_it_reads(folder: Path) -> None:
    for prompt, completion in zip(PROMPTS, completions(engine_of(folder)), strict=True):
        found = array_of(completion.experts)
        ids = [*prompt, *completion.token_ids]
        assert found.shape == (len(ids) - 1, 2, 2), "two of the three layers have experts"
        assert np.array_equal(np.sort(found, axis=-1), chosen_by_transformers(folder, ids)[:-1])


def test_experts_are_those_of_the_weights_that_read_the_token(folder: Path, another: Path) -> None:
    engine = engine_of(folder)
    engine.add(SampleRequest("r", PROMPTS[0], Sampling(max_new_tokens=12, seed=3), frozenset()))
    for _ in range(5):  # the prompt, then four of its tokens
        engine.step()
    engine.load_policy(weights_files(another), 1)
    (completion,) = drained(engine)
    assert [(span.policy_version, span.num_tokens) for span in completion.versions] == [(0, 5), (1, 7)]
    before = len(PROMPTS[0]) + 4
    found = np.sort(array_of(completion.experts), axis=-1)
    ids = [*PROMPTS[0], *completion.token_ids][:-1]
    old, new = (chosen_by_transformers(one, ids) for one in (folder, another))
    assert np.array_equal(found[:before], old[:before])
    assert not np.array_equal(found[before:], old[before:]), "the new weights choose others"
    # The first layer reads embeddings only through its own attention; its keys of older tokens are of older weights.
    assert (found[before:] == new[before:]).mean() > (found[before:] == old[before:]).mean()


async def test_a_rollout_that_another_worker_continues_keeps_the_experts_of_its_tokens(
    folder: Path, another: Path
) -> None:
    """The second worker has other weights: kept tokens have the experts of the first one's, the others its own."""
    prompt, num_kept = PROMPTS[0], 10
    request = SampleRequest("r0", prompt, Sampling(max_new_tokens=NUM_TOKENS, seed=1), frozenset())
    first = engine_of(folder)
    first.add(request)
    sampled = [(first.step(), first.sampled("r0", 0))[1] for _ in range(num_kept)]
    begin, whole = sampled[5], sampled[-1]
    assert begin is not None
    assert whole is not None
    piece = tokens_from([int32(prompt), begin], 0)
    pieces = [piece, PartialRollout.rest_of_turn(piece.end_token, whole.after(6))]
    assert first.sampled("r0", 6) == whole.after(6)
    kept = decode_pieces(b"".join(encode_piece(piece) for piece in pieces))
    async with SteppedEngine(engine_of(another), GenerationMetrics()) as engine:
        sampler = ResumableSampler(engine, kept)
        completion = await asyncio.wait_for(sampler.sample(request), 60)
    rollout = assemble_rollout(Task("r0", "g", "p", "", Sampling()), [int32(prompt), completion], "")
    assert (sampler.num_continued, rollout.num_sampled_tokens) == (num_kept, NUM_TOKENS)
    found = np.sort(array_of(decode_rollout(encode_rollout(rollout)[1]).experts), axis=-1)
    ids = rollout.token_ids.tolist()[:-1]
    of_first, of_second = chosen_by_transformers(folder, ids), chosen_by_transformers(another, ids)
    place = len(prompt) + num_kept - 1
    assert (found[:place] == of_first[:place]).all()
    assert (found[place:] == of_second[place:]).all()
    assert (of_first[:place] != of_second[:place]).any(), "the weights matter"


def test_a_dense_policy_has_no_experts_to_record(tmp_path: Path) -> None:
    write_policy_folder(tmp_path, random_policy(0))
    with pytest.raises(EngineUnusable, match=r"policy\.router_replay needs a policy with experts"):
        engine_of(tmp_path)
    with pytest.raises(ValueError, match=r"policy\.router_replay needs a policy with experts, and this is a Qwen3For"):
        replay_experts(random_policy(0))


def test_router_replay_needs_an_engine_that_records() -> None:
    with pytest.raises(
        ConfigError, match=r"router_replay needs generation\.engine torch: no other engine records experts"
    ):
        load_config(None, ["policy.router_replay=true", "generation.engine=vllm"])


def test_with_equal_weights_replay_is_the_plain_forward_pass(folder: Path) -> None:
    rollouts = rollouts_of(completions(engine_of(folder)))
    with torch.no_grad():
        plain = score_tokens(load_model(folder), row_of(rollouts, replays_experts=False)).logprobs
        replayed = score_tokens(replaying(folder), row_of(rollouts, replays_experts=True)).logprobs
    torch.testing.assert_close(replayed, plain, rtol=0, atol=1e-6)
    sampled = torch.cat([torch.tensor(rollout.logprobs.tolist()) for rollout in rollouts])
    torch.testing.assert_close(replayed, sampled, rtol=0, atol=1e-4)


class Used:
    """The experts and their weights that each layer computes with, in the order of the layers."""

    def __init__(self, model: Any) -> None:
        self.ids: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.logits: list[Tensor] = []
        for router in routers_of(model):
            router.register_forward_hook(lambda module, inputs, output: self.logits.append(output[0]))
        for module in model.modules():
            if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts"):
                module.register_forward_pre_hook(self._see)

    def _see(self, module: Any, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
        self.ids.append(inputs[1])
        self.weights.append(inputs[2])


def test_with_other_weights_replay_uses_exactly_the_recorded_experts(folder: Path, another: Path) -> None:
    rollouts = rollouts_of(completions(engine_of(folder)))
    recorded = np.concatenate([array_of(rollout.experts) for rollout in rollouts])
    model = replaying(another)
    used = Used(model)
    score_tokens(model, row_of(rollouts, replays_experts=True))
    assert np.array_equal(torch.stack(used.ids, dim=1).numpy(), recorded)
    for layer, (weights, logits) in enumerate(zip(used.weights, used.logits, strict=True)):
        among = logits.detach().double().gather(1, torch.from_numpy(recorded[:, layer].astype(np.int64)))
        # Normalised over the chosen ones, softmax over all experts is softmax over the chosen ones.
        assert float((weights.detach().double() - among.softmax(-1)).abs().max()) < 1e-6
    plain = Used(model)
    score_tokens(model, row_of(rollouts, replays_experts=False))
    assert not np.array_equal(torch.stack(plain.ids, dim=1).sort(-1).values.numpy(), np.sort(recorded, axis=-1))


@pytest.mark.parametrize("kind", [ActivationCheckpointing.FULL, ActivationCheckpointing.SELECTIVE])
def test_the_second_forward_pass_of_a_checkpoint_replays_too(another: Path, kind: ActivationCheckpointing) -> None:
    batch = with_random_experts(random_batch(0, seed=2), random_policy_with_experts(0), seed=4)
    rollouts = [graded.rollout for graded in batch.rollouts]
    row = row_of(rollouts, replays_experts=True)
    expected = gradient(replaying(another), [row])
    model = replaying(another)
    checkpoint_activations(model, kind)
    assert difference(gradient(model, [row]), expected) < 1e-6


def gradient(model: Any, rows: Sequence[MicroBatch]) -> Tensor:
    model.zero_grad()
    for row in rows:
        torch.autograd.backward(score_tokens(model, row).logprobs.sum())
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("replays_experts", [False, True])
def test_packed_rollouts_have_the_gradients_of_each_alone(folder: Path, replays_experts: bool) -> None:
    batch = with_random_experts(random_batch(0, seed=2), random_policy_with_experts(0), seed=4)
    rollouts = [graded.rollout for graded in batch.rollouts]
    model = replaying(folder)
    packed = gradient(model, [row_of(rollouts, replays_experts=replays_experts)])
    alone = gradient(model, [row_of([rollout], replays_experts=replays_experts) for rollout in rollouts])
    assert difference(packed, alone) < 1e-5
    other = gradient(model, [row_of(rollouts, replays_experts=not replays_experts)])
    assert difference(other, packed) > 1e-2, "replay matters here"


def test_a_step_with_replay_has_no_mismatch_where_the_weights_are_those_of_generation(folder: Path) -> None:
    rollouts = rollouts_of(completions(engine_of(folder)))
    learner = LearnerSection(steps_per_batch=1, advantage=AdvantageSection(overlong=Overlong.KEPT))
    trainer = Trainer(load_model(folder), Config(learner=learner, policy=PolicySection(router_replay=True)))
    (step,) = trainer.train_batch(batch_of(rollouts)).steps
    assert step.diagnostics["mismatch_abs_mean"] < 1e-5
    assert step.gradient_norm > 0
    bare = [replace(rollout, experts=None) for rollout in rollouts]
    with pytest.raises(ValueError, match="no rollout of batch 0 has recorded experts"):
        trainer.train_batch(batch_of(bare))


def test_a_token_without_a_record_has_the_experts_of_the_router(another: Path, folder: Path) -> None:
    rollouts = rollouts_of(completions(engine_of(folder)))
    mixed = [replace(rollouts[0], experts=None), *rollouts[1:]]
    model, plain = replaying(another), load_model(another)
    with torch.no_grad():
        found = score_tokens(model, row_of(mixed, replays_experts=True)).logprobs
        bare = score_tokens(plain, row_of(mixed, replays_experts=False)).logprobs
        replayed = score_tokens(model, row_of(rollouts, replays_experts=True)).logprobs
    count = rollouts[0].num_sampled_tokens
    torch.testing.assert_close(found[:count], bare[:count], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[count:], replayed[count:], rtol=0, atol=1e-5)
    assert float((bare[count:] - replayed[count:]).abs().max()) > 1e-3


def test_replay_makes_the_mismatch_to_a_sampler_in_bfloat16_smaller() -> None:
    """As where vLLM samples in 16 bits and the learner computes in 32."""
    policy = random_policy_with_experts(0, num_experts=32, top_k=2)
    sampler = copy.deepcopy(policy).bfloat16()
    rollouts = [graded.rollout for graded in random_batch(0, seed=5, num_groups=8, max_tokens=100).rollouts]
    used, row = Used(sampler), row_of(rollouts, replays_experts=False)
    with torch.no_grad():
        sampled = score_tokens(sampler, row).logprobs
        plain = score_tokens(policy, row).logprobs
        of_sampler = torch.stack(used.ids, dim=1)
        replay_experts(policy)
        hidden = policy.base_model(
            input_ids=row.input_ids,
            position_ids=row.position_ids,
            layout=row.layout,
            use_cache=False,
            experts=of_sampler,
        ).last_hidden_state
        logits = policy.lm_head(hidden[0, row.positions])
    replayed = logits.log_softmax(-1).gather(1, row.targets[:, None])[:, 0]
    without, with_replay = (float((one - sampled).abs().mean()) for one in (plain, replayed))
    print(f"mean difference of log-probabilities: {without:.2e} without replay, {with_replay:.2e} with it")
    assert with_replay < 0.8 * without


def test_a_folder_is_published_with_the_names_and_values_of_hugging_face(folder: Path, tmp_path: Path) -> None:
    model = load_model(folder)
    manifest = PolicyPublisher(tmp_path, keep=2).write(StagedPolicy.of(model, 0, 0, stored_dtypes(folder)))
    first, again = (tensors_of(one) for one in (folder, Path(manifest.folder)))
    assert "model.layers.2.mlp.experts.7.down_proj.weight" in first
    assert again.keys() == first.keys()
    assert all(torch.equal(again[name], first[name]) for name in first)
    engine = engine_of(folder)
    engine.load_policy(weights_files(Path(manifest.folder)), 1)
    assert engine.policy_version == 1


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in weights_files(folder):
        with safe_open(file, "pt") as shard:
            found |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 - not iterable
    return found


def test_experts_that_are_not_whole_are_named(folder: Path) -> None:
    weights = split_experts(random_policy_with_experts(0).state_dict())
    assert {name: tensor.shape for name, tensor in merge_experts(weights).items()} == {
        name: tensor.shape for name, tensor in random_policy_with_experts(0).state_dict().items()
    }
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    with pytest.raises(ValueError, match=f"{name} is missing"):
        merge_experts({other: tensor for other, tensor in weights.items() if other != name})
    with pytest.raises(ValueError, match=r"the experts of model\.layers\.0\.mlp\.experts have different shapes"):
        merge_experts({**weights, name: weights[name][:1]})
    engine = engine_of(folder)
    with pytest.raises(EngineError):
        engine.load_policy([folder / "config.json"], 1)


def test_only_the_chosen_experts_count_as_work() -> None:
    policy = random_policy_with_experts(0)
    of_one = sum(weight.numel() for name, weight in policy.named_parameters() if ".mlp.experts." in name) // 8
    embedding = policy.state_dict()["model.embed_tokens.weight"].numel()
    assert active_parameters(policy) == policy.num_parameters() - 6 * of_one - embedding
    tied = random_policy(0, tied=True)
    assert active_parameters(tied) == tied.num_parameters(), "the embedding is the head too"
