"""The vllm engine with adapters that change in flight: merged while they are loaded, or refused before the pause."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.contract.random_adapters import adapted, metadata_of
from tests.contract.reference_logprobs import fresh_logprobs, replayed_logprobs

from nouscoder.domain.rollout import Sampling
from nouscoder.domain.tokens import Completion
from nouscoder.generation.engines.base import Engine, EngineError, SampleRequest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default"), pytest.mark.timeout(1800)]

OpenVllm = Callable[..., AbstractAsyncContextManager[Engine]]
LIMIT_S = 300.0
TOLERANCE = 2e-3
NUM_VERSIONS = 4


def request_of(number: int, num_tokens: int) -> SampleRequest:
    """A request that only its length ends."""
    return SampleRequest(
        f"r{number}", (1, 5 + number % 50, 9, 3), Sampling(max_new_tokens=num_tokens, seed=number + 1), frozenset()
    )


def versions_of(completion: Completion) -> list[int]:
    """The version of each token."""
    return [span.policy_version for span in completion.versions for _ in range(span.num_tokens)]


async def tokens_after(engine: Engine, num_tokens: int) -> None:
    """Wait until the engine has sampled so many more tokens."""
    wanted = engine.num_tokens + num_tokens
    async with asyncio.timeout(LIMIT_S):
        while engine.num_tokens < wanted:
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
async def test_tokens_have_the_logprobs_of_the_merged_weights_of_their_version(
    open_vllm: OpenVllm, policies: list[Path], tmp_path: Path, on_update: str
) -> None:
    versions = [adapted(tmp_path / str(seed), policies[0], seed) for seed in range(NUM_VERSIONS)]
    requests = [request_of(number, 200) for number in range(4)]
    async with open_vllm(on_update) as engine:
        await engine.load_policy(versions[0][0], 0)
        futures = [engine.sample(request) for request in requests]
        for version in range(1, NUM_VERSIONS):
            await tokens_after(engine, 100)
            await engine.load_policy(versions[version][0], version)
        completions = await asyncio.wait_for(asyncio.gather(*futures), LIMIT_S)
    merged = {version: folder for version, (_, folder) in enumerate(versions)}
    largest = 0.0
    for request, completion in zip(requests, completions, strict=True):
        of_tokens = versions_of(completion)
        assert set(of_tokens) == set(range(NUM_VERSIONS))
        fresh = torch.stack([fresh_logprobs(merged[version], request, completion) for version in merged])
        assert float((fresh[0] - fresh[1]).abs().max()) > 100 * TOLERANCE, "the versions matter"
        wanted = fresh[torch.tensor(of_tokens), torch.arange(len(of_tokens))]
        if on_update == "keep":
            wanted = replayed_logprobs(merged, request, completion)
        largest = max(largest, float((wanted - torch.tensor(completion.logprobs)).abs().max()))
    print(f"{on_update}: largest difference of a log-probability: {largest:.2e}")
    assert largest < TOLERANCE


@pytest.mark.parametrize("fault", ["missing matrix", "not finite", "of another base", "cut"])
async def test_a_wrong_adapter_leaves_the_old_version_serving(
    open_vllm: OpenVllm, policies: list[Path], tmp_path: Path, fault: str
) -> None:
    files, merged = adapted(tmp_path / "1", policies[0], 1)
    wrong, _ = adapted(tmp_path / "2", policies[0], 2)
    adapter = wrong[-1]
    metadata, tensors = metadata_of(adapter), load_file(adapter)
    name = next(name for name in tensors if name.endswith("lora_B.weight"))
    if fault == "missing matrix":
        del tensors[name]
    elif fault == "not finite":
        tensors[name][0, 0] = float("nan")
    elif fault == "of another base":
        tensors[name] = tensors[name][1:].contiguous()
    save_file(tensors, adapter, metadata)
    if fault == "cut":
        adapter.write_bytes(adapter.read_bytes()[:-100])
    async with open_vllm() as engine:
        await engine.load_policy(files, 1)
        running = engine.sample(request_of(0, 150))
        await tokens_after(engine, 10)
        with pytest.raises(EngineError):
            await engine.load_policy(wrong, 2)
        assert (engine.paused, engine.policy_version) == (False, 1)
        completion = await asyncio.wait_for(running, LIMIT_S)
        assert set(versions_of(completion)) == {1}
        fresh = fresh_logprobs(merged, request_of(0, 150), completion)
        assert float((fresh - torch.tensor(completion.logprobs)).abs().max()) < TOLERANCE
        await engine.load_policy(files, 3)
        later = await asyncio.wait_for(engine.sample(request_of(1, 20)), LIMIT_S)
        assert set(versions_of(later)) == {3}
