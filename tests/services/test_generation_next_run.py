"""A generation process that leaves its run and serves the next one with the same engine, within its limits."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest
from tests.free_addresses import free_addresses

from nouscoder.config import Config, load_config
from nouscoder.demo.policy import CharTokenizer
from nouscoder.domain.policy import PolicyManifest, Shard
from nouscoder.domain.rollout import Rollout, Sampling, Task
from nouscoder.domain.tokens import Completion
from nouscoder.generation.engines.base import EngineError, SampleRequest
from nouscoder.generation.engines.fake import FakeEngine
from nouscoder.generation.engines.stepped import SteppedEngine
from nouscoder.generation.metrics import GenerationMetrics
from nouscoder.generation.next_run import NextRun, RunRefused, reason_to_start_again
from nouscoder.generation.rollouts import ContextLimit
from nouscoder.rpc.generation_client import GenerationClient
from nouscoder.run.local_services import KeptGeneration
from nouscoder.run.supervisor import ProcessState

LIMIT_S = 240.0  # a process loads a tokenizer's library first


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A policy folder without weights, for the fake engine."""
    CharTokenizer().save(tmp_path / "policy")
    (tmp_path / "policy/config.json").write_text('{"model_type": "qwen3"}')
    return tmp_path / "policy"


def config_of(folder: Path, *values: str) -> Config:
    settings = [f'policy.path="{folder}"', "generation.engine=fake", "generation.max_tokens_total=40"]
    return load_config(None, [*settings, "generation.engine_tokens_total=90", *values])


REASONS = {
    "generation.max_tokens_total=91": "generation.max_tokens_total 91 is more than the 90 tokens",
    "evaluation.max_tokens_total=91": "evaluation.max_tokens_total 91 is more than the 90 tokens",
    "generation.max_running=3": "generation.max_running is not what the engine was started with",
    "generation.openai.http=127.0.0.1:0": "the engine was started with 0 places for generation.openai, not 8",
    "generation.engine=torch": "generation.engine is not",
    "generation.vllm.dtype=float16": "generation.vllm is not",
    "generation.grpc=127.0.0.1:1": "generation.grpc is not",
}


def test_what_the_engine_can_take_needs_no_new_start_and_the_rest_is_named(folder: Path) -> None:
    started = config_of(folder)
    live = config_of(
        folder,
        *("generation.max_tokens_total=90", "generation.sampling.max_new_tokens=80", "run.name=other"),
        *("generation.partial_every_tokens=5", 'generation.environment.system_prompt="Be brief."'),
    )
    assert reason_to_start_again(started, live) is None
    for value, says in REASONS.items():
        assert says in str(reason_to_start_again(started, config_of(folder, value)))
    keep = ("generation.engine=vllm", "generation.vllm.on_update=keep")
    assert "on_update keep" in str(reason_to_start_again(config_of(folder, *keep), config_of(folder, *keep)))
    learner = "generation.policy_from=learner"
    assert "from the learner" in str(reason_to_start_again(config_of(folder, learner), config_of(folder, learner)))


def test_another_architecture_needs_a_new_start(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    CharTokenizer().save(other)
    with pytest.raises(RunRefused, match=r"other/config\.json cannot be read"):
        reason_to_start_again(config_of(folder), config_of(other))
    (other / "config.json").write_text('{"model_type": "qwen3", "rope_scaling": {"type": "yarn"}}')
    assert "as with YaRN" in str(reason_to_start_again(config_of(folder), config_of(other)))


async def test_a_change_is_answered_when_the_next_run_is_served(folder: Path) -> None:
    first, second = config_of(folder, "run.name=first"), config_of(folder, "run.name=second")
    wanted = [first, second, config_of(folder, "run.name=third"), second]
    runs = NextRun(first, lambda: wanted.pop(0))
    assert (await runs.change(), runs.wanted) == ("first", None), "it is served already"
    changing = asyncio.create_task(runs.change())
    await asyncio.wait_for(runs.asked.wait(), LIMIT_S)
    with pytest.raises(RunRefused, match="the change to run second is in progress"):
        await runs.change()
    assert [runs.wanted] == [second]
    assert not changing.done()
    runs.begun(second)
    assert await changing == "second"
    assert (runs.wanted, await runs.change()) == (None, "second")
    with pytest.raises(RunRefused, match="without a configuration file"):
        await NextRun(first, None).change()


async def test_a_limit_below_the_engines_cuts_completions_and_refuses_prompts(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes((8).to_bytes(8, "little") + b"weights.")

    def endless(number: int, num_prompt_tokens: int) -> SampleRequest:
        return SampleRequest(f"r{number}", (5,) * num_prompt_tokens, Sampling(max_new_tokens=500), frozenset())

    async with SteppedEngine(FakeEngine(max_running=2, max_tokens_total=100), GenerationMetrics()) as engine:
        await engine.load_policy([file], 0)
        limited = ContextLimit(engine, 30)
        completion: Completion = await asyncio.wait_for(limited.sample(endless(0, 20)), LIMIT_S)
        assert len(completion.token_ids) == 10
        assert len((await asyncio.wait_for(engine.sample(endless(0, 20)), LIMIT_S)).token_ids) == 80
        with pytest.raises(EngineError, match="request r1: a prompt of 30 tokens leaves no room in a total of 30"):
            await limited.sample(endless(1, 30))


def manifest(folder: Path) -> PolicyManifest:
    data = (8).to_bytes(8, "little") + b"weights."
    (folder / "model.safetensors").write_bytes(data)
    shard = Shard("model.safetensors", hashlib.sha256(data).hexdigest(), len(data))
    return PolicyManifest(0, 0, str(folder), (shard,))


async def sampled(client: GenerationClient, folder: Path, *, evaluation: bool = False) -> Rollout:
    """A rollout that only the context ends."""
    await client.use_policy(manifest(folder))
    task = Task("r0", "g", "p", "prompt", Sampling(max_new_tokens=500, seed=1))
    (rollout,) = [rollout async for rollout in client.generate([task], LIMIT_S, evaluation=evaluation)]
    return rollout


@pytest.mark.heavy
async def test_the_process_of_a_plan_serves_the_next_stage_with_other_limits_or_is_ended_with_the_reason(
    folder: Path, tmp_path: Path
) -> None:
    address, metrics, broker, *others = free_addresses(5)

    def stage(name: str, max_tokens_total: int, grpc: str, metrics: str, *values: str) -> Config:
        """The broker is never there: only Generate is used."""
        addresses = (f"generation.grpc={grpc}", f"generation.metrics={metrics}", f"broker.grpc={broker}")
        limits = (f"generation.max_tokens_total={max_tokens_total}", "generation.fake.median_tokens=300")
        return config_of(folder, f"run.name={name}", *addresses, *limits, *values)

    said: list[str] = []
    (tmp_path / "logs").mkdir()
    kept = KeptGeneration(tmp_path, said.append)
    try:
        first = stage("first", 40, address, metrics, "evaluation.max_tokens_total=70")
        await kept.prepare(first)
        process = kept.start(first)
        async with GenerationClient(address, patience_s=LIMIT_S) as client, asyncio.timeout(LIMIT_S):
            assert len((await sampled(client, folder)).token_ids) == 40
            assert len((await sampled(client, folder, evaluation=True)).token_ids) == 70, "a context of its own"
            pid = process.pid
            second = kept.with_address(stage("second", 90, *others))
            await kept.prepare(second)
            assert kept.start(second).pid == pid
            assert (await client.status()).policy_version is None, "its first policy is not that of the stage before"
            assert len((await sampled(client, folder)).token_ids) == 90
            assert (process.pid, process.num_restarts, said) == (pid, 0, [])
            await kept.prepare(kept.with_address(stage("third", 91, *others)))
        (why,) = said
        assert "generation is started again for third" in why
        assert "generation.max_tokens_total 91 is more than the 90 tokens that the engine was started for" in why
        assert (kept.processes, process.state) == ([], ProcessState.STOPPED)
    finally:
        await kept.close()
