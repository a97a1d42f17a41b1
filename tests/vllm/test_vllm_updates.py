"""The vllm engine under updates: exact versions and log-probabilities, nothing lost, no update that fails does harm."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.contract.reference_logprobs import fresh_logprobs, model_of, replayed_logprobs

from nouscoder.config import load_config
from nouscoder.domain.rollout import Sampling
from nouscoder.domain.tokens import Completion, SampledTokens
from nouscoder.generation.engines import vllm_requests, vllm_start
from nouscoder.generation.engines.base import Engine, EngineError, SampleRequest
from nouscoder.generation.engines.vllm_requests import completion_of
from nouscoder.generation.partials import ResumableSampler

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default"), pytest.mark.timeout(1800)]

OpenVllm = Callable[..., AbstractAsyncContextManager[Engine]]
LIMIT_S = 300.0
TOLERANCE = 2e-3
# Updates in a row, of each mode. A smaller number is enough while the tests are changed.
NUM_UPDATES = int(os.environ.get("NOUSCODER_VLLM_UPDATES", "200"))


def request_of(number: int, num_tokens: int, temperature: float = 1.0) -> SampleRequest:
    """A request that only its length ends."""
    sampling = Sampling(max_new_tokens=num_tokens, seed=number + 1, temperature=temperature)
    return SampleRequest(f"r{number}", (1, 5 + number % 50, 9, 3), sampling, frozenset())


def weights(folder: Path) -> list[Path]:
    return [folder / "model.safetensors"]


def versions_of(completion: SampledTokens) -> list[int]:
    """The version of each token."""
    return [span.policy_version for span in completion.versions for _ in range(span.num_tokens)]


async def tokens_after(engine: Engine, num_tokens: int) -> None:
    """Wait until the engine has sampled so many more tokens."""
    wanted = engine.num_tokens + num_tokens
    async with asyncio.timeout(LIMIT_S):
        while engine.num_tokens < wanted:
            await asyncio.sleep(0.002)


async def sampled_during(
    engine: Engine, policies: list[Path], requests: list[SampleRequest], between: int
) -> list[Completion]:
    """Completions of requests that run while every policy after the first is loaded, `between` tokens apart."""
    futures = [engine.sample(request) for request in requests]
    for version, folder in enumerate(policies[1:], start=1):
        await tokens_after(engine, between)
        await engine.load_policy(weights(folder), version)
    return list(await asyncio.wait_for(asyncio.gather(*futures), LIMIT_S))


async def test_recompute_gives_the_logprobs_of_a_fresh_forward_at_each_tokens_version(
    open_vllm: OpenVllm, policies: list[Path]
) -> None:
    requests = [request_of(number, 200) for number in range(4)]
    async with open_vllm("recompute") as engine:
        await engine.load_policy(weights(policies[0]), 0)
        completions = await sampled_during(engine, policies, requests, between=100)
    largest = 0.0
    for request, completion in zip(requests, completions, strict=True):
        versions = versions_of(completion)
        assert set(versions) == {0, 1, 2, 3}
        assert all(older <= newer for older, newer in pairwise(versions))
        fresh = torch.stack([fresh_logprobs(folder, request, completion) for folder in policies])
        wanted = fresh[torch.tensor(versions), torch.arange(len(versions))]
        largest = max(largest, float((wanted - torch.tensor(completion.logprobs)).abs().max()))
        # The versions matter: another version's log-probabilities are far away.
        assert float((fresh[0] - fresh[1]).abs().max()) > 100 * TOLERANCE
    print(f"largest difference of a log-probability: {largest:.2e}")
    assert largest < TOLERANCE


async def test_keep_gives_the_logprobs_of_a_replay_with_the_older_keys_and_values(
    open_vllm: OpenVllm, policies: list[Path]
) -> None:
    """A fresh forward pass differs after the first update, because it has other keys and values."""
    requests = [request_of(number, 200) for number in range(4)]
    async with open_vllm("keep") as engine:
        await engine.load_policy(weights(policies[0]), 0)
        completions = await sampled_during(engine, policies, requests, between=100)
    largest = 0.0
    for request, completion in zip(requests, completions, strict=True):
        versions = torch.tensor(versions_of(completion))
        sampled = torch.tensor(completion.logprobs)
        assert set(versions.tolist()) == {0, 1, 2, 3}
        replayed = replayed_logprobs(dict(enumerate(policies)), request, completion)
        largest = max(largest, float((replayed - sampled).abs().max()))
        last = fresh_logprobs(policies[3], request, completion)
        assert float((last - sampled).abs()[versions == 3].max()) > 10 * TOLERANCE
    print(f"largest difference from the replay: {largest:.2e}")
    assert largest < TOLERANCE


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
async def test_greedy_output_after_an_update_is_that_of_the_new_weights(
    open_vllm: OpenVllm, policies: list[Path], on_update: str
) -> None:
    """More requests than fit were waiting while the weights changed."""
    requests = [request_of(number % 3, 60, temperature=0.0) for number in range(3)]
    async with open_vllm(on_update, max_running=2) as engine:
        await engine.load_policy(weights(policies[0]), 0)
        before = await sampled_during(engine, policies[:1], requests, between=0)
        running = [engine.sample(request) for request in requests]
        await tokens_after(engine, 4)
        await engine.load_policy(weights(policies[1]), 1)
        await asyncio.wait_for(asyncio.gather(*running), LIMIT_S)
        after = await sampled_during(engine, policies[:1], requests, between=0)
    for request, old, new in zip(requests, before, after, strict=True):
        assert list(new.token_ids) == greedy(policies[1], request) != list(old.token_ids)


def greedy(folder: Path, request: SampleRequest) -> list[int]:
    """The likeliest tokens by transformers."""
    prompt = torch.tensor([request.prompt_token_ids])
    length = request.sampling.max_new_tokens
    made = model_of(folder).generate(prompt, max_new_tokens=length, do_sample=False, eos_token_id=None, pad_token_id=0)
    return list(made[0, prompt.shape[1] :].tolist())


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
async def test_no_prompt_is_found_in_the_cache_of_older_weights(
    open_vllm: OpenVllm, policies: list[Path], monkeypatch: pytest.MonkeyPatch, on_update: str
) -> None:
    """The prompt is longer than a block of the cache. The second request of each version does find it there."""
    num_cached: list[int] = []

    def noted(request_id: str, output: Any) -> Completion:
        num_cached.append(output.num_cached_tokens)
        return completion_of(request_id, output)

    monkeypatch.setattr(vllm_requests, "completion_of", noted)
    prompt = tuple(3 + 7 * place % 60 for place in range(200))
    sampling = Sampling(max_new_tokens=12, seed=1, temperature=0.0)
    completions = []
    async with open_vllm(on_update) as engine:
        for version in range(3):
            await engine.load_policy(weights(policies[version]), version)
            for number in range(2):
                request = SampleRequest(f"{version}/{number}", prompt, sampling, frozenset())
                completions.append(await asyncio.wait_for(engine.sample(request), LIMIT_S))
    assert num_cached[::2] == [0, 0, 0], "the first request of a version"
    assert min(num_cached[1::2]) > 0, "the second one: the cache works"
    for place, completion in enumerate(completions):
        assert list(completion.token_ids) == greedy(policies[place // 2], request)


def bad_files(kind: str, folder: Path, target: Path) -> list[Path]:
    """Files that cannot be loaded, made from the weights of a policy."""
    file = target / "model.safetensors"
    data = (folder / "model.safetensors").read_bytes()
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    if kind == "truncated":
        file.write_bytes(data[:-100])
        return [file]
    if kind == "missing":
        return [target / "gone.safetensors"]
    if kind == "lacks a tensor":
        del tensors[name]
    elif kind == "wrong shape":
        tensors[name] = tensors[name][:, :-1].contiguous()
    elif kind == "not finite":
        tensors[name][0, 0] = float("nan")
    save_file(tensors, file)
    return [file]


@pytest.mark.parametrize("kind", ["truncated", "missing", "lacks a tensor", "wrong shape", "not finite"])
@pytest.mark.parametrize("is_checked", [True, False], ids=["checked", "unchecked"])
async def test_a_failed_update_leaves_the_old_version_serving(
    open_vllm: OpenVllm,
    policies: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    is_checked: bool,
) -> None:
    """Checked files fail before the pause. Unchecked ones fail in vLLM, which loads the old ones again."""
    if not is_checked:
        if kind in ("lacks a tensor", "not finite"):
            pytest.skip("vLLM loads such files; the check is what refuses them")
        monkeypatch.setattr("nouscoder.generation.engines.vllm.Architecture.check", lambda *_: None)
    files = bad_files(kind, policies[1], tmp_path)
    async with open_vllm() as engine:
        await engine.load_policy(weights(policies[0]), 7)
        running = engine.sample(request_of(0, 150))
        await tokens_after(engine, 10)
        with pytest.raises(EngineError):
            await engine.load_policy(files, 8)
        assert (engine.paused, engine.policy_version) == (False, 7)
        completion = await asyncio.wait_for(running, LIMIT_S)
        assert set(versions_of(completion)) == {7}
        fresh = fresh_logprobs(policies[0], request_of(0, 150), completion)
        assert float((fresh - torch.tensor(completion.logprobs)).abs().max()) < TOLERANCE
        await engine.load_policy(weights(policies[2]), 9)
        later = await asyncio.wait_for(engine.sample(request_of(1, 20)), LIMIT_S)
        assert set(versions_of(later)) == {9}


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
async def test_no_token_is_lost_or_doubled_by_many_updates(
    open_vllm: OpenVllm, policies: list[Path], on_update: str
) -> None:
    """Each request must end once with all its tokens, and their log-probabilities must be those of its versions."""
    ended: list[tuple[SampleRequest, Completion]] = []
    stopping = False

    async def load(number: int) -> None:
        while not stopping:
            request = request_of(number, 40 + number % 17)
            ended.append((request, await asyncio.wait_for(engine.sample(request), LIMIT_S)))

    async with open_vllm(on_update, max_running=6) as engine:
        await engine.load_policy(weights(policies[0]), 0)
        loads = [asyncio.create_task(load(number)) for number in range(8)]
        pauses_s = []
        for version in range(1, NUM_UPDATES + 1):
            pauses_s.append(await engine.load_policy(weights(policies[version % len(policies)]), version))
            await tokens_after(engine, 10)
        stopping = True
        await asyncio.gather(*loads)
        assert engine.policy_version == NUM_UPDATES
        assert (engine.num_running, engine.num_waiting) == (0, 0)
        assert engine.num_tokens >= sum(len(completion.token_ids) for _, completion in ended)
    for request, completion in ended:
        versions = versions_of(completion)
        assert len(completion.token_ids) == request.sampling.max_new_tokens
        assert all(older <= newer for older, newer in pairwise(versions))
    assert max(len(set(versions_of(completion))) for _, completion in ended) > 2
    if on_update == "recompute":
        # Nothing is sampled twice: the engine has counted exactly the tokens of the completions.
        assert engine.num_tokens == sum(len(completion.token_ids) for _, completion in ended)
        request, completion = max(ended, key=lambda each: len(set(versions_of(each[1]))))
        fresh = torch.stack([fresh_logprobs(folder, request, completion) for folder in policies])
        policy_of_token = torch.tensor(versions_of(completion)) % len(policies)
        wanted = fresh[policy_of_token, torch.arange(len(policy_of_token))]
        assert float((wanted - torch.tensor(completion.logprobs)).abs().max()) < TOLERANCE
    print(f"{NUM_UPDATES} updates, {len(ended)} rollouts, median pause {sorted(pauses_s)[len(pauses_s) // 2]:.3f} s")


async def test_a_pause_outlasts_an_update_and_ends_at_its_limit(open_vllm: OpenVllm, policies: list[Path]) -> None:
    async with open_vllm() as engine:
        await engine.load_policy(weights(policies[0]), 0)
        running = engine.sample(request_of(0, 100))
        await tokens_after(engine, 5)
        await engine.pause(LIMIT_S)
        num_tokens = engine.num_tokens
        await engine.load_policy(weights(policies[1]), 1)
        assert (engine.paused, engine.num_tokens) == (True, num_tokens)
        await engine.pause(0.3)
        completion = await asyncio.wait_for(running, LIMIT_S)
        assert not engine.paused
        assert set(versions_of(completion)) == {0, 1}


async def test_every_sampled_token_is_counted_when_a_pause_begins(
    open_vllm: OpenVllm, policies: list[Path], shared_vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the task that reads vLLM's outputs is many steps behind, as it is with 256 requests."""
    async with open_vllm() as engine:
        await engine.load_policy(weights(policies[0]), 0)
        running = [engine.sample(request_of(number, 200)) for number in range(4)]
        await tokens_after(engine, 4)
        core = shared_vllm.engine_core
        read = core.get_output_async

        async def slowly() -> Any:
            await asyncio.sleep(0.05)
            return await read()

        monkeypatch.setattr(core, "get_output_async", slowly)
        async with asyncio.timeout(LIMIT_S):
            while core.outputs_queue.qsize() < 3:  # steps that vLLM has done and nobody has read
                await asyncio.sleep(0)
        await engine.pause(LIMIT_S)
        num_tokens = engine.num_tokens
        assert num_tokens == sum(engine.progress.values())
        monkeypatch.undo()
        for _ in range(200):
            await asyncio.sleep(0)
        assert (engine.num_tokens, core.outputs_queue.qsize()) == (num_tokens, 0)
        await engine.resume()
        assert [len((await completion).token_ids) for completion in running] == [200] * 4


def test_a_step_may_have_as_many_tokens_as_in_vllms_offline_api(
    policies: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU of 80 GB: 16,384. With another context than that of the offline API vLLM would take 2,048."""
    from vllm.engine import arg_utils
    from vllm.v1.engine.async_llm import AsyncLLM

    given: dict[str, Any] = {}
    monkeypatch.setattr(AsyncLLM, "from_engine_args", lambda _arguments, **options: given.update(options))
    vllm_start.start_vllm(load_config(None, []).generation, policies[0], 256, lambda _num_tokens: None)
    gpu = SimpleNamespace(
        get_device_total_memory=lambda: 80 * 2**30,
        get_device_name=lambda: "NVIDIA H100",
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )
    monkeypatch.setattr(arg_utils, "current_platform", gpu)
    tokens_of_a_step, _ = arg_utils.EngineArgs.get_batch_defaults(1)
    assert tokens_of_a_step.get(given.get("usage_context")) == 16384


async def test_a_caller_that_is_cancelled_does_not_leave_the_engine_paused(
    open_vllm: OpenVllm, policies: list[Path]
) -> None:
    async with open_vllm() as engine:
        await engine.load_policy(weights(policies[0]), 0)
        running = engine.sample(request_of(0, 150))
        await tokens_after(engine, 5)
        updating = asyncio.create_task(engine.load_policy(weights(policies[1]), 1))
        await asyncio.sleep(0.01)
        updating.cancel()
        completion = await asyncio.wait_for(running, LIMIT_S)
        assert len(completion.token_ids) == 150
        assert engine.policy_version in (0, 1)


async def readings_until(
    engine: Engine, requests: list[SampleRequest], ended: asyncio.Future[Any]
) -> list[tuple[str, int, SampledTokens]]:
    """(request id, first token, tokens) of the running requests, read again and again until `ended`."""
    found = []
    while not ended.done():
        for start in (0, 30):
            tokens = await engine.sampled({request.request_id: start for request in requests})
            found += [(request_id, start, read) for request_id, read in tokens.items()]
        await asyncio.sleep(0.002)
    return found


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
async def test_the_tokens_of_a_running_request_are_a_prefix_of_the_final_ones(
    open_vllm: OpenVllm, policies: list[Path], on_update: str
) -> None:
    """They are read while the weights change, and between the changes."""
    requests = [request_of(number, 240) for number in range(4)]
    during: list[list[tuple[str, int, SampledTokens]]] = []
    async with open_vllm(on_update) as engine:
        await engine.load_policy(weights(policies[0]), 0)
        futures = [engine.sample(request) for request in requests]
        for version, folder in enumerate(policies[1:], start=1):
            await tokens_after(engine, 60)
            update = asyncio.ensure_future(engine.load_policy(weights(folder), version))
            during.append(await readings_until(engine, requests, update))
            await update
        gathered = asyncio.gather(*futures)
        after = await readings_until(engine, requests, gathered)
        final = dict(zip([request.request_id for request in requests], await gathered, strict=True))
        assert await engine.sampled({"r0": 0}) == {}, "a request that has ended has left"
    assert all(during), "each update is met by a reading"
    for request_id, start, read in [*chain.from_iterable(during), *after]:
        whole = final[request_id].after(start)
        end = len(read.token_ids)
        assert 0 < end <= len(whole.token_ids)
        assert (read.token_ids, read.logprobs) == (whole.token_ids[:end], whole.logprobs[:end])
        assert versions_of(read) == versions_of(whole)[:end]
    assert {start for _, start, _ in after} == {0, 30}
    most = max((read for _, start, read in after if start == 0), key=lambda read: len(read.versions))
    assert [span.policy_version for span in most.versions] == [0, 1, 2, 3]


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
async def test_a_rollout_that_another_worker_continues_has_the_logprobs_of_each_tokens_version(
    open_vllm: OpenVllm, policies: list[Path], on_update: str
) -> None:
    """The first worker is gone after versions 0 and 1, and the second one begins with version 2.

    With `keep` the tokens after an update in a worker have older keys and values. Those of its first version do not.
    """
    request = request_of(0, 220)
    async with open_vllm(on_update) as engine:
        await engine.load_policy(weights(policies[0]), 0)
        first = ResumableSampler(engine)
        future = first.sample(request)
        await tokens_after(engine, 40)
        await engine.load_policy(weights(policies[1]), 1)
        await tokens_after(engine, 20)
        kept = first.unsaved((await engine.sampled({"r0": first.first_unsaved}))["r0"])
        future.cancel()
    assert kept is not None
    num_kept = kept.num_sampled_tokens
    async with open_vllm(on_update) as engine:
        await engine.load_policy(weights(policies[2]), 2)
        second = ResumableSampler(engine, kept)
        future = second.sample(request)
        await tokens_after(engine, 30)
        await engine.load_policy(weights(policies[3]), 3)
        completion = await asyncio.wait_for(future, LIMIT_S)
        assert engine.num_tokens == 220 - num_kept == 220 - second.num_continued, "no kept token is sampled again"
    versions = torch.tensor(versions_of(completion))
    assert set(versions[:num_kept].tolist()) == {0, 1}
    assert set(versions[num_kept:].tolist()) == {2, 3}
    (_, tokens) = kept.parts()
    assert isinstance(tokens, SampledTokens)
    assert (completion.token_ids[:num_kept], completion.logprobs[:num_kept]) == (tokens.token_ids, tokens.logprobs)
    fresh = torch.stack([fresh_logprobs(folder, request, completion) for folder in policies])
    difference = (fresh[versions, torch.arange(len(versions))] - torch.tensor(completion.logprobs)).abs()
    checked = torch.isin(versions, torch.tensor([0, 1, 2, 3] if on_update == "recompute" else [0, 2]))
    largest = float(difference[checked].max())
    print(f"largest difference of a log-probability: {largest:.2e}")
    assert largest < TOLERANCE
    assert float((fresh[1] - fresh[2]).abs()[num_kept:].max()) > 100 * TOLERANCE, "the version matters"
