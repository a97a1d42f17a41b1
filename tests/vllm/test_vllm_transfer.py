"""Policies from the memory of a learner's process to vLLM's worker: exact, staged while it samples, never in its way.

The transport is gloo on the CPU. nccl differs in the process group and the device only; it needs two GPUs, and no test
here has run it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.contract.reference_logprobs import fresh_logprobs

from nouscoder.domain.policy import PolicyDelta, PolicyManifest, Shard, WeightTransfer
from nouscoder.domain.rollout import Sampling
from nouscoder.domain.tokens import Completion
from nouscoder.generation.engines.base import Engine, EngineError, SampleRequest
from nouscoder.generation.engines.vllm import VllmEngine
from nouscoder.generation.metrics import FetchResult, GenerationMetrics
from nouscoder.generation.weights.errors import PolicyUnusable
from nouscoder.generation.weights.policies import Policies
from nouscoder.generation.weights.source import LearnerMemory
from nouscoder.rpc.learner_client import LearnerClient

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default"), pytest.mark.timeout(1800)]

OpenVllm = Callable[..., AbstractAsyncContextManager[Engine]]
SCRIPT = Path(__file__).with_name("sending_learner.py")
LIMIT_S = 300.0
TOLERANCE = 2e-3


class Learner:
    """A process that publishes and sends. `run` names the run of the test, `transfer` how it sends."""

    run, transfer = "", WeightTransfer.GLOO

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self._process = process
        self.address = address

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    @classmethod
    async def started(cls, folder: Path) -> Learner:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(SCRIPT), str(folder)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**20,
        )
        return cls(process, await _line(process))

    async def publish(
        self, version: int, file: Path, *, is_other: bool = False, wait_s: float = 0.0, die_after: int | None = None
    ) -> PolicyManifest:
        """See sending_learner.py."""
        order = {"run": self.run, "version": version, "weights": str(file), "is_other": is_other, "wait_s": wait_s}
        order["transfer"] = self.transfer
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**order, "die_after": die_after}).encode() + b"\n")
        made = json.loads(await _line(self._process))
        shards = tuple(Shard(**shard) for shard in made["shards"])
        delta = made["delta"] and PolicyDelta(
            made["delta"]["base_version"],
            made["delta"]["base_digest"],
            tuple(Shard(**file) for file in made["delta"]["files"]),
        )
        return PolicyManifest(made["policy_version"], made["step"], made["folder"], shards, delta=delta)

    async def killed(self) -> None:
        """Wait for its death by SIGKILL."""
        assert await asyncio.wait_for(self._process.wait(), LIMIT_S) == -signal.SIGKILL

    async def close(self) -> None:
        if self.is_alive:
            os.kill(self._process.pid, signal.SIGKILL)
            await self._process.wait()


async def _line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), LIMIT_S)
    assert line, f"the learner's process ended with {process.returncode}"
    return line.decode().strip()


class Rig:
    """A learner's process, an engine, and the way between them."""

    def __init__(
        self,
        learner: Learner,
        client: LearnerClient,
        engine: VllmEngine,
        policies: Policies,
        metrics: GenerationMetrics,
    ) -> None:
        self.learner = learner
        self.client = client
        self.engine = engine
        self.policies = policies
        self._metrics = metrics

    def counts(self) -> tuple[float, float]:
        """Policies that came from memory, and those that should have."""
        name = "nouscoder_generation_policy_fetches_total"
        found = [
            self._metrics.registry.get_sample_value(name, {"result": result.value})
            for result in (FetchResult.FROM_MEMORY, FetchResult.NOT_FROM_MEMORY)
        ]
        return found[0] or 0.0, found[1] or 0.0


@pytest.fixture(scope="session")
async def learners(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Callable[[], Awaitable[Learner]]]:
    """Gives the one process of all tests, or a new one after its death, because a start takes long."""
    folder = tmp_path_factory.mktemp("learner")
    started: list[Learner] = []

    async def living() -> Learner:
        if not started or not started[-1].is_alive:
            started.append(await Learner.started(folder))
        started[-1].run = uuid.uuid4().hex
        return started[-1]

    yield living
    for learner in started:
        await learner.close()


@pytest.fixture(params=[WeightTransfer.GLOO, WeightTransfer.IPC])
async def rig(
    open_vllm: OpenVllm, learners: Callable[[], Awaitable[Learner]], request: pytest.FixtureRequest
) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        learner = await learners()
        learner.transfer = request.param
        client = await stack.enter_async_context(LearnerClient(learner.address))
        engine = cast(VllmEngine, await stack.enter_async_context(open_vllm()))
        metrics = GenerationMetrics()
        policies = Policies(engine, None, LearnerMemory(client, engine, metrics))
        yield Rig(learner, client, engine, policies, metrics)


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def request_of(number: int, num_tokens: int) -> SampleRequest:
    """A request that only its length ends."""
    sampling = Sampling(max_new_tokens=num_tokens, seed=number + 1, temperature=1.0)
    return SampleRequest(f"r{number}", (1, 5 + number % 50, 9, 3), sampling, frozenset())


def versions_of(completion: Completion) -> list[int]:
    return [span.policy_version for span in completion.versions for _ in range(span.num_tokens)]


async def sampled(engine: Engine, number: int) -> Completion:
    return await asyncio.wait_for(engine.sample(request_of(number, 40)), LIMIT_S)


def check_logprobs(folder: Path, number: int, completion: Completion) -> None:
    """The log-probabilities are those of a fresh forward pass with the weights of the folder."""
    fresh = fresh_logprobs(folder, request_of(number, 40), completion)
    assert float((fresh - torch.tensor(completion.logprobs)).abs().max()) < TOLERANCE


@contextmanager
def hidden(manifest: PolicyManifest) -> Iterator[None]:
    """The files of a policy are elsewhere meanwhile, so nobody can read them."""
    folder = Path(manifest.folder)
    elsewhere = folder.rename(folder.with_name("hidden"))
    yield
    elsewhere.rename(folder)


async def test_policies_come_from_the_learners_memory_without_their_files(rig: Rig, policies: list[Path]) -> None:
    """From the second on, only the changes are sent."""
    for version, folder in enumerate(policies):
        manifest = await rig.learner.publish(version, weights(folder))
        assert len(manifest.shards) > 2
        assert (manifest.delta is None) == (version == 0)
        with hidden(manifest):
            assert await rig.policies.follow(manifest)
        completion = await sampled(rig.engine, version)
        assert set(versions_of(completion)) == {version}
        check_logprobs(folder, version, completion)
    assert rig.counts() == (len(policies), 0)


async def test_sampling_goes_on_while_a_policy_arrives(rig: Rig, policies: list[Path]) -> None:
    """Requests of the old version begin and end between the first and the last piece of the new one."""
    await rig.policies.follow(await rig.learner.publish(0, weights(policies[0])))
    manifest = await rig.learner.publish(1, weights(policies[1]), wait_s=1.0)
    following = asyncio.create_task(rig.policies.follow(manifest))
    during = 0
    while not following.done():
        completion = await sampled(rig.engine, during)
        if not following.done():
            during += 1
            assert not rig.engine.paused
            assert set(versions_of(completion)) == {0}
    assert await following
    assert during
    assert set(versions_of(await sampled(rig.engine, 100))) == {1}
    assert rig.counts() == (2, 0)


async def test_a_learner_that_dies_while_it_sends_costs_only_the_transfer(rig: Rig, policies: list[Path]) -> None:
    await rig.policies.follow(await rig.learner.publish(0, weights(policies[0])))
    manifest = await rig.learner.publish(1, weights(policies[1]), die_after=2)
    running = asyncio.create_task(sampled(rig.engine, 1))
    assert await rig.policies.follow(manifest)
    await rig.learner.killed()
    await running
    assert not rig.engine.paused
    completion = await sampled(rig.engine, 2)
    assert set(versions_of(completion)) == {1}
    check_logprobs(policies[1], 2, completion)
    assert rig.counts() == (1, 1)


async def test_other_bytes_than_the_files_are_never_loaded(rig: Rig, policies: list[Path]) -> None:
    """A policy after a gap is sent whole."""
    await rig.policies.follow(await rig.learner.publish(0, weights(policies[0])))
    assert await rig.policies.follow(await rig.learner.publish(2, weights(policies[1]), is_other=True))
    completion = await sampled(rig.engine, 0)
    assert set(versions_of(completion)) == {2}
    check_logprobs(policies[1], 0, completion)
    assert rig.counts() == (1, 1)


async def test_an_engine_that_comes_too_late_takes_the_files(rig: Rig, policies: list[Path]) -> None:
    older = await rig.learner.publish(0, weights(policies[0]))
    newest = await rig.learner.publish(1, weights(policies[1]))
    assert await rig.policies.follow(older)
    check_logprobs(policies[0], 0, await sampled(rig.engine, 0))
    assert await rig.policies.follow(newest)
    check_logprobs(policies[1], 1, await sampled(rig.engine, 1))
    assert rig.counts() == (1, 1)


def bad(kind: str, folder: Path, target: Path) -> Path:
    """Weights that are no policy of this architecture."""
    tensors = load_file(weights(folder))
    name = "model.layers.1.mlp.down_proj.weight"
    if kind == "lacks a tensor":
        del tensors[name]
    elif kind == "wrong shape":
        tensors[name] = tensors[name][:, :-1].contiguous()
    elif kind == "not finite":
        tensors[name][0, 0] = float("nan")
    save_file(tensors, target)
    return target


@pytest.mark.parametrize("kind", ["lacks a tensor", "wrong shape", "not finite"])
async def test_a_bad_policy_leaves_the_old_one_serving(
    rig: Rig, policies: list[Path], tmp_path: Path, kind: str
) -> None:
    await rig.policies.follow(await rig.learner.publish(0, weights(policies[0])))
    manifest = await rig.learner.publish(1, bad(kind, policies[1], tmp_path / "bad.safetensors"))
    with pytest.raises(PolicyUnusable, match="down_proj"):
        await rig.policies.follow(manifest)
    assert (rig.engine.paused, rig.engine.policy_version) == (False, 0)
    check_logprobs(policies[0], 0, await sampled(rig.engine, 0))
    assert await rig.policies.follow(await rig.learner.publish(2, weights(policies[2])))
    check_logprobs(policies[2], 1, await sampled(rig.engine, 1))
    assert rig.counts() == (2, 1)


async def test_a_staged_policy_that_vllm_cannot_load_leaves_the_one_before_it_from_memory(
    rig: Rig, policies: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of the shapes is off, so vLLM itself fails in the middle. The files of the old policy are gone."""
    first = await rig.learner.publish(0, weights(policies[0]))
    await rig.policies.follow(first)
    for shard in first.shards:
        (Path(first.folder) / shard.name).unlink()
    monkeypatch.setattr("nouscoder.generation.engines.vllm.Architecture.check_shapes", lambda *_: None)
    manifest = await rig.learner.publish(1, bad("wrong shape", policies[1], tmp_path / "bad.safetensors"))
    rendezvous = await rig.client.send_policy(1, manifest.digest, 1)
    await rig.engine.stage_policy(manifest, rendezvous)
    with pytest.raises(EngineError):
        await rig.engine.load_staged(1)
    assert (rig.engine.paused, rig.engine.policy_version) == (False, 0)
    check_logprobs(policies[0], 0, await sampled(rig.engine, 0))
