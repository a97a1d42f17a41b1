"""The contract of every engine: one suite for all engines that can be configured."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.contract.random_adapters import adapted, metadata_of
from tests.contract.reference_logprobs import fresh_logprobs

from nouscoder.config import Config, load_config
from nouscoder.domain.rollout import Sampling
from nouscoder.domain.tokens import Completion, FinishReason, VersionSpan, float32, int32
from nouscoder.generation.engines import open_engine, step_engine
from nouscoder.generation.engines.base import Engine, EngineError, EngineStopped, EngineUnusable, SampleRequest
from nouscoder.generation.metrics import GenerationMetrics

MAX_RUNNING, MAX_TOKENS_TOTAL, VOCABULARY = 4, 40, 64
STOP = frozenset({2})
LIMIT_S = 120.0
NUM_UPDATES = 200

# The tensors are tiny, so more threads would only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, random_policy: Callable[..., Path]) -> list[Path]:
    """Policies that differ in all weights."""
    root = tmp_path_factory.mktemp("policies")
    return [random_policy(root / str(seed), seed=seed) for seed in range(3)]


@pytest.fixture
def folder(folders: list[Path]) -> Path:
    return folders[0]


# Importing vLLM warns of its own dependencies.
VLLM = pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.filterwarnings("default")])


@pytest.fixture(params=["torch", "fake", VLLM])
def config(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Config:
    if request.param == "vllm":
        shared = request.getfixturevalue("shared_vllm")
        monkeypatch.setattr("nouscoder.generation.engines.vllm.start_vllm", shared)
    return load_config(
        None,
        [
            f"generation.engine={request.param}",
            f"generation.max_running={MAX_RUNNING}",
            f"generation.max_tokens_total={MAX_TOKENS_TOTAL}",
            "generation.vllm.dtype=float32",
            "generation.vllm.enforce_eager=true",
            "generation.vllm.kv_cache_memory_bytes=67108864",
        ],
    )


@pytest.fixture
def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


@pytest.fixture
async def new_engine(config: Config, folder: Path) -> AsyncIterator[Engine]:
    """An engine without a policy."""
    async with open_engine(config, folder, GenerationMetrics()) as opened:
        yield opened


@pytest.fixture
async def engine(new_engine: Engine, weights: Path) -> Engine:
    await new_engine.load_policy([weights], 3)
    return new_engine


def request_of(
    number: int, max_new_tokens: int = 6, prompt: Sequence[int] = (), stop: frozenset[int] = STOP
) -> SampleRequest:
    sampling = Sampling(max_new_tokens=max_new_tokens, seed=number + 1)
    return SampleRequest(f"r{number}", tuple(prompt) or (1, 5 + number // 2, 9), sampling, stop)


async def completion_of(engine: Engine, request: SampleRequest) -> Completion:
    return await asyncio.wait_for(engine.sample(request), LIMIT_S)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def another_token(engine: Engine) -> None:
    num_tokens = engine.num_tokens
    await until(lambda: engine.num_tokens > num_tokens)


def versions_of(completion: Completion) -> list[int]:
    return [span.policy_version for span in completion.versions]


async def test_the_configured_engine_is_opened(new_engine: Engine, config: Config) -> None:
    assert new_engine.name == config.generation.engine


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "holds no config.json"), ('{"model_type": "mamba"}', "the torch engine does not run models of type mamba")],
)
def test_a_folder_that_holds_no_policy_is_refused_by_name(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(EngineUnusable, match=rf"{tmp_path}.*{says}"):
        open_engine(load_config(None, []), tmp_path, GenerationMetrics())


async def test_every_request_ends_once_with_a_completion_of_its_prompt(engine: Engine) -> None:
    requests = [request_of(number, max_new_tokens=2 + number % 7) for number in range(15)]
    futures = [engine.sample(request) for request in requests]
    most = 0
    while not all(future.done() for future in futures):
        most = max(most, engine.num_running)
        await asyncio.sleep(0)
    assert most <= MAX_RUNNING
    completions = [future.result() for future in futures]
    assert engine.num_tokens == sum(len(completion.token_ids) for completion in completions)
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    for request, completion in zip(requests, completions, strict=True):
        assert len(completion.token_ids) <= request.sampling.max_new_tokens
        assert all(0 <= token < VOCABULARY for token in completion.token_ids)
        assert versions_of(completion) == [3]


async def test_a_completion_does_not_depend_on_the_other_requests(engine: Engine) -> None:
    first = await completion_of(engine, request_of(0))
    others = [engine.sample(request_of(number)) for number in range(1, 6)]
    again = await completion_of(engine, request_of(0))
    # A product of another batch size may round the last bit of a log-probability differently.
    assert list(again.logprobs) == pytest.approx(list(first.logprobs), abs=1e-5)
    assert replace(again, logprobs=first.logprobs) == first
    await asyncio.gather(*others)


async def test_a_stop_token_of_the_request_ends_the_completion_and_belongs_to_it(engine: Engine) -> None:
    completion = await completion_of(engine, request_of(0, stop=frozenset(range(VOCABULARY))))
    assert (len(completion.token_ids), completion.finish_reason) == (1, FinishReason.STOP)
    endless = await completion_of(engine, request_of(0, max_new_tokens=20, stop=frozenset()))
    assert (len(endless.token_ids), endless.finish_reason) == (20, FinishReason.LENGTH)


def test_every_token_has_the_version_with_which_it_was_sampled(config: Config, folder: Path, weights: Path) -> None:
    """Uses single steps, so that the new weights come after a known number of tokens. tests/vllm has vLLM's test."""
    if config.generation.engine == "vllm":
        pytest.skip("vLLM decodes in its own loop")
    stepped = step_engine(config, folder)
    stepped.load_policy([weights], 3)
    stepped.add(request_of(0, max_new_tokens=7, stop=frozenset()))
    stepped.add(request_of(1, max_new_tokens=2, stop=frozenset()))
    ended: dict[str, Completion] = {}
    for step in range(20):
        if step == 3:
            stepped.load_policy([weights], 4)
        ended |= dict(stepped.step())
    assert [(span.policy_version, span.num_tokens) for span in ended["r0"].versions] == [(3, 3), (4, 4)]
    assert versions_of(ended["r1"]) == [3]
    assert stepped.policy_version == 4


def test_guests_have_places_beside_those_of_rollouts(config: Config, folder: Path, weights: Path) -> None:
    """Uses single steps, so that it is known who waits. vLLM's requests get places by the same rule (EnginePlaces)."""
    if config.generation.engine == "vllm":
        pytest.skip("vLLM decodes in its own loop")
    api = config.generation.openai.model_copy(update={"http": "127.0.0.1:0", "slots": 2})
    generation = config.generation.model_copy(update={"openai": api})
    stepped = step_engine(config.model_copy(update={"generation": generation}), folder)
    stepped.load_policy([weights], 3)
    for number in range(9):
        stepped.add(request_of(number, max_new_tokens=3 + number, stop=frozenset()))
    for number in (20, 21, 22):
        stepped.add(replace(request_of(number, max_new_tokens=30, stop=frozenset()), is_guest=True))
    for _ in range(8):
        stepped.step()
        running = list(stepped.progress)
        guests = [name for name in running if name in ("r20", "r21", "r22")]
        assert guests == ["r20", "r21"], "the third waits, and rollouts never take the places of guests"
        assert len(running) - len(guests) <= MAX_RUNNING
        if stepped.num_waiting > 1 and stepped.num_waiting < 5:
            assert len(running) - len(guests) >= MAX_RUNNING - 1, "guests take no place of rollouts"


async def test_new_weights_are_in_use_when_load_policy_returns(engine: Engine, weights: Path) -> None:
    running = [engine.sample(request_of(number, max_new_tokens=30)) for number in range(40)]
    assert await engine.load_policy([weights], 4) >= 0
    assert engine.policy_version == 4
    assert versions_of(await completion_of(engine, request_of(99))) == [4]
    for completion in await asyncio.gather(*running):
        assert versions_of(completion) in ([3], [3, 4], [4])


async def test_many_updates_in_a_row_lose_and_double_nothing(engine: Engine, folders: list[Path]) -> None:
    """Requests run all the time, more than fit. Each ends once, with all its tokens, and none is sampled again."""
    ended: list[tuple[SampleRequest, Completion]] = []
    stopping = False

    async def keep_busy(caller: int) -> None:
        number = caller
        while not stopping:
            request = request_of(number, max_new_tokens=20 + number % 15, stop=frozenset())
            ended.append((request, await completion_of(engine, request)))
            number += 6

    callers = [asyncio.create_task(keep_busy(caller)) for caller in range(6)]
    for update in range(NUM_UPDATES):
        await another_token(engine)
        await engine.load_policy([folders[update % 3] / "model.safetensors"], 4 + update)
    stopping = True
    await asyncio.gather(*callers)
    assert engine.policy_version == 3 + NUM_UPDATES
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    for request, completion in ended:
        assert len(completion.token_ids) == request.sampling.max_new_tokens
        assert all(older < newer for older, newer in pairwise(versions_of(completion)))
    assert len({version for _, completion in ended for version in versions_of(completion)}) > 1
    assert engine.num_tokens == sum(len(completion.token_ids) for _, completion in ended)


async def test_greedy_output_after_updates_is_that_of_a_fresh_engine(config: Config, folders: list[Path]) -> None:
    if config.generation.engine == "fake":
        pytest.skip("its tokens do not depend on weights")
    files = [[folder / "model.safetensors"] for folder in folders]
    sampling = Sampling(max_new_tokens=20, temperature=0.0)
    requests = [SampleRequest(f"r{number}", (1, 5 + number, 9), sampling, frozenset()) for number in range(3)]

    async def greedy(engine: Engine) -> list[list[int]]:
        return [list((await completion_of(engine, request)).token_ids) for request in requests]

    async with open_engine(config, folders[0], GenerationMetrics()) as fresh:
        await fresh.load_policy(files[2], 0)
        wanted = await greedy(fresh)
    async with open_engine(config, folders[0], GenerationMetrics()) as engine:
        await engine.load_policy(files[0], 0)
        before = await greedy(engine)
        running = [engine.sample(request_of(number, max_new_tokens=30, stop=frozenset())) for number in range(3, 9)]
        await engine.load_policy(files[1], 1)
        await engine.load_policy(files[2], 2)
        await asyncio.wait_for(asyncio.gather(*running), LIMIT_S)
        after = await greedy(engine)
    assert after == wanted != before


async def test_adapters_of_a_base_sample_as_the_weights_with_them_merged(
    new_engine: Engine, folder: Path, tmp_path: Path
) -> None:
    """Two versions in a row. Then one that does not fit, which is refused as a whole."""
    if new_engine.name == "fake":
        pytest.skip("its log-probabilities do not depend on weights")
    request = request_of(0, max_new_tokens=30, stop=frozenset())
    for version in (1, 2):
        files, merged = adapted(tmp_path / str(version), folder, seed=version)
        await new_engine.load_policy(files, version)
        completion = await completion_of(new_engine, request)
        sampled = torch.tensor(list(completion.logprobs))
        assert versions_of(completion) == [version]
        assert float((fresh_logprobs(merged, request, completion) - sampled).abs().max()) < 2e-3
        assert float((fresh_logprobs(folder, request, completion) - sampled).abs().max()) > 0.1, "the adapter matters"
    tensors = load_file(files[-1])
    name = next(name for name in tensors if name.endswith("lora_B.weight"))
    save_file(tensors | {name: tensors[name][1:].contiguous()}, files[-1], metadata_of(files[-1]))
    with pytest.raises(EngineError, match="is an adapter of another policy: its matrices do not fit"):
        await new_engine.load_policy(files, 3)
    again = await completion_of(new_engine, request)
    assert replace(again, logprobs=completion.logprobs) == completion


def rest_of(request: SampleRequest, whole: Completion, num_kept: int) -> SampleRequest:
    """The request that continues `whole` from its first `num_kept` tokens on."""
    return replace(
        request,
        prompt_token_ids=(*request.prompt_token_ids, *whole.token_ids[:num_kept]),
        sampling=replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - num_kept),
        num_kept=num_kept,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_request_that_goes_on_from_kept_tokens_ends_as_if_it_had_never_stopped(
    engine: Engine, temperature: float
) -> None:
    if temperature and engine.name == "vllm":
        pytest.skip("the random stream of vLLM always starts from its beginning")
    for number in range(3):
        request = request_of(number, max_new_tokens=24)
        request = replace(request, sampling=replace(request.sampling, temperature=temperature))
        whole = await completion_of(engine, request)
        for num_kept in range(1, len(whole.token_ids), 5):
            rest = await completion_of(engine, rest_of(request, whole, num_kept))
            assert list(rest.token_ids) == list(whole.token_ids[num_kept:])
            assert rest.finish_reason is whole.finish_reason
            assert list(rest.logprobs) == pytest.approx(list(whole.logprobs[num_kept:]), abs=2e-3)


async def test_the_logprobs_after_kept_tokens_are_those_of_a_fresh_forward_at_the_version_in_use(
    engine: Engine, folders: list[Path]
) -> None:
    """The kept tokens were sampled with other weights. Keys and values of them are computed with the new ones."""
    if engine.name == "fake":
        pytest.skip("its log-probabilities do not depend on weights")
    request = request_of(0, max_new_tokens=30, stop=frozenset())
    whole = await completion_of(engine, request)
    await engine.load_policy([folders[1] / "model.safetensors"], 4)
    rest = await completion_of(engine, rest_of(request, whole, num_kept=20))
    ids = int32([*whole.token_ids[:20], *rest.token_ids])
    continued = Completion(ids, float32([-1.0] * len(ids)), (VersionSpan(4, len(ids)),), rest.finish_reason)
    new, old = (fresh_logprobs(folder, request, continued)[20:] for folder in (folders[1], folders[0]))
    sampled = torch.tensor(list(rest.logprobs))
    assert float((new - sampled).abs().max()) < 2e-3
    assert float((old - sampled).abs().max()) > 0.1, "the version matters"
    assert versions_of(rest) == [4]


def test_the_tokens_of_a_running_request_can_be_read(config: Config, folder: Path, weights: Path) -> None:
    """Uses single steps, so that the number of tokens is known. tests/vllm has vLLM's test."""
    if config.generation.engine == "vllm":
        pytest.skip("vLLM decodes in its own loop")
    stepped = step_engine(config, folder)
    stepped.load_policy([weights], 3)
    stepped.add(request_of(0, max_new_tokens=7, stop=frozenset()))
    for _ in range(4):
        stepped.step()
    stepped.load_policy([weights], 4)
    stepped.step()
    assert stepped.sampled("unknown", 0) is None
    assert stepped.sampled("r0", 5) is None
    whole, rest = stepped.sampled("r0", 0), stepped.sampled("r0", 2)
    assert whole is not None
    assert rest == whole.after(2)
    assert rest.versions == (VersionSpan(3, 2), VersionSpan(4, 1))
    ((_, completion),) = [ended for _ in range(2) for ended in stepped.step()]
    assert (completion.token_ids[:5], completion.logprobs[:5]) == (whole.token_ids, whole.logprobs)
    assert stepped.sampled("r0", 0) is None, "a request that has ended has left"


async def test_a_request_without_the_token_that_is_asked_for_has_none_to_read(engine: Engine) -> None:
    await engine.pause(LIMIT_S)
    waiting = engine.sample(request_of(0))
    await until(lambda: engine.num_waiting == 1)
    assert await engine.sampled({"r0": 0}) == {}
    await engine.resume()
    await asyncio.wait_for(waiting, LIMIT_S)


async def test_a_request_of_a_guest_counts_as_waiting(engine: Engine) -> None:
    await engine.pause(LIMIT_S)
    waiting = [engine.sample(request_of(0)), engine.sample(replace(request_of(1), is_guest=True))]
    await until(lambda: engine.num_waiting == 2)
    waiting[0].cancel()
    await until(lambda: engine.num_waiting == 1)
    waiting[1].cancel()
    await until(lambda: engine.num_waiting == 0)
    await engine.resume()


@pytest.mark.parametrize("content", [None, b"", b"no weights at all"])
async def test_weights_that_cannot_be_read_are_refused_and_change_nothing(
    engine: Engine, weights: Path, tmp_path: Path, content: bytes | None
) -> None:
    bad = tmp_path / "bad.safetensors"
    if content is not None:
        bad.write_bytes(content)
    with pytest.raises(EngineError, match=r"bad\.safetensors"):
        await engine.load_policy([weights, bad], 4)
    assert engine.policy_version == 3
    assert versions_of(await completion_of(engine, request_of(0))) == [3]


async def test_a_request_waits_for_the_first_policy(new_engine: Engine, weights: Path) -> None:
    assert new_engine.policy_version is None
    future = new_engine.sample(request_of(0))
    await until(lambda: new_engine.num_waiting == 1)
    await until(lambda: new_engine.idle_s > 0)
    assert not future.done()
    await new_engine.load_policy([weights], 0)
    assert versions_of(await asyncio.wait_for(future, LIMIT_S)) == [0]


async def test_a_cancelled_request_frees_its_place_and_its_id(engine: Engine) -> None:
    await engine.pause(LIMIT_S)
    futures = [engine.sample(request_of(number)) for number in range(7)]
    await until(lambda: engine.num_waiting == 7)
    futures[0].cancel()
    futures[6].cancel()
    await until(lambda: engine.num_waiting == 5)
    again = engine.sample(request_of(0))
    await engine.resume()
    await asyncio.wait_for(asyncio.gather(again, *futures[1:6]), LIMIT_S)
    assert (engine.num_running, engine.num_waiting) == (0, 0)


async def test_a_running_request_can_be_cancelled(engine: Engine) -> None:
    future = engine.sample(request_of(0, max_new_tokens=30, stop=frozenset()))
    await until(lambda: engine.num_tokens > 0)
    future.cancel()
    await until(lambda: engine.num_running == 0)
    assert len((await completion_of(engine, request_of(0))).token_ids) > 0


async def test_requests_go_on_as_before_when_others_are_cancelled(engine: Engine) -> None:
    """Before, the torch engine failed: it moves the last row to a free place, outside of torch's inference mode."""
    requests = [request_of(number, max_new_tokens=30, stop=frozenset()) for number in range(MAX_RUNNING)]
    alone = [await completion_of(engine, request) for request in requests]
    await engine.pause(LIMIT_S)
    again = [engine.sample(request) for request in requests]
    await until(lambda: engine.num_waiting == MAX_RUNNING)
    before = engine.num_tokens
    await engine.resume()
    await until(lambda: engine.num_tokens > before)
    again[0].cancel()
    for number in range(1, MAX_RUNNING):
        done = await asyncio.wait_for(again[number], LIMIT_S)
        assert list(done.token_ids) == list(alone[number].token_ids)


async def test_pausing_stops_decoding_until_resume(engine: Engine) -> None:
    await engine.pause(LIMIT_S)
    future = engine.sample(request_of(0))
    await until(lambda: engine.num_waiting == 1)
    idle_s = engine.idle_s
    await until(lambda: engine.idle_s > idle_s)
    assert (engine.paused, engine.num_tokens) == (True, 0)
    await engine.resume()
    await asyncio.wait_for(future, LIMIT_S)
    assert (engine.paused, engine.num_tokens > 0) == (False, True)


async def test_a_pause_ends_at_its_time_limit(engine: Engine) -> None:
    await engine.pause(0.3)
    assert (engine.paused, engine.num_tokens) == (True, 0)
    await completion_of(engine, request_of(0))
    assert (engine.paused, engine.idle_s > 0) == (False, True)


async def test_max_tokens_total_cuts_a_completion(engine: Engine) -> None:
    prompt = [5] * (MAX_TOKENS_TOTAL - 4)
    completion = await completion_of(engine, request_of(0, max_new_tokens=1000, prompt=prompt, stop=frozenset()))
    assert (len(completion.token_ids), completion.finish_reason) == (4, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (SampleRequest("r9", (), Sampling(), STOP), "the prompt is empty"),
        (SampleRequest("r9", (5,) * MAX_TOKENS_TOTAL, Sampling(), STOP), "leaves no room"),
        (SampleRequest("r9", (5,), Sampling(max_new_tokens=0), STOP), "max_new_tokens must be at least 1"),
    ],
)
async def test_a_request_that_cannot_be_answered_is_refused_by_name(
    engine: Engine, request_: SampleRequest, says: str
) -> None:
    with pytest.raises(EngineError, match=rf"request r9.*{says}"):
        await completion_of(engine, request_)
    assert engine.num_waiting == 0


async def test_an_id_that_is_in_use_is_refused(engine: Engine) -> None:
    await engine.pause(LIMIT_S)
    first = engine.sample(request_of(0))
    with pytest.raises(EngineError, match="request r0: the id is in use"):
        await completion_of(engine, request_of(0))
    await engine.resume()
    await asyncio.wait_for(first, LIMIT_S)


async def test_closing_an_engine_ends_open_requests(config: Config, folder: Path) -> None:
    async with open_engine(config, folder, GenerationMetrics()) as engine:
        waiting = engine.sample(request_of(0))
    with pytest.raises(EngineStopped, match="engine is stopping"):
        await waiting
    with pytest.raises(EngineStopped, match="engine is stopping"):
        await engine.failed()
