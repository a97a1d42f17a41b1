"""GenerationService over a real channel with the fake engine, and its process from outside."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from nouscoder.demo.policy import CharTokenizer
from nouscoder.domain.policy import PolicyManifest, Shard, Transport
from nouscoder.domain.rollout import Rollout, Sampling, Task
from nouscoder.domain.tokens import Completion, FinishReason
from nouscoder.generation.engines.base import Engine, EngineError, EngineStopped, SampleRequest
from nouscoder.generation.engines.fake import FakeEngine
from nouscoder.generation.engines.stepped import SteppedEngine
from nouscoder.generation.environments.prompts import SingleTurn
from nouscoder.generation.metrics import GenerationMetrics
from nouscoder.generation.rollouts import Rollouts
from nouscoder.generation.servicer import STATUS_CODES, GenerationServicer
from nouscoder.generation.weights.policies import Policies
from nouscoder.rpc.channel import open_channel
from nouscoder.rpc.pairs import MANIFEST, TASK
from nouscoder.rpc.status_codes import StatusCodes
from nouscoder.store.rollout_record import decode_rollout
from nouscoder.v1 import generation_pb2, generation_pb2_grpc


def published(folder: Path, version: int) -> PolicyManifest:
    data = (8).to_bytes(8, "little") + b"weights" + bytes([version])
    path = folder / f"{version}.safetensors"
    path.write_bytes(data)
    shard = Shard(path.name, hashlib.sha256(data).hexdigest(), len(data))
    return PolicyManifest(version, version, str(folder), (shard,))


def paths(manifest: PolicyManifest) -> tuple[Path, ...]:
    return tuple(Path(manifest.folder) / shard.name for shard in manifest.shards)


def task(number: int, prompt: str = "prompt") -> Task:
    return Task(f"r{number}", "g", "p", prompt, Sampling(max_new_tokens=50, seed=number))


def request_of(number: int) -> SampleRequest:
    return SampleRequest(f"r{number}", (5, 6, 7), Sampling(seed=number), frozenset({2}))


@dataclass
class Bench:
    stub: Any
    engine: Engine
    metrics: GenerationMetrics

    def metric(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(name, labels)
        assert value is not None, f"there is no metric {name} {labels}"
        return value

    async def generate(self, tasks: list[Task]) -> list[Rollout]:
        request = generation_pb2.GenerateRequest(tasks=[TASK.to(each) for each in tasks])
        return [decode_rollout(answer.record) async for answer in self.stub.Generate(request, timeout=60)]

    async def update(self, manifest: PolicyManifest) -> Any:
        return await self.stub.UpdatePolicy(
            generation_pb2.UpdatePolicyRequest(manifest=MANIFEST.to(manifest)), timeout=60
        )

    async def status(self) -> Any:
        return await self.stub.Status(generation_pb2.GenerationServiceStatusRequest(), timeout=60)


@pytest.fixture
async def bench(single_turn: SingleTurn) -> AsyncIterator[Bench]:
    metrics = GenerationMetrics()
    async with AsyncExitStack() as stack:
        step_engine = FakeEngine(max_running=4, max_tokens_total=100)
        engine = await stack.enter_async_context(SteppedEngine(step_engine, metrics))
        server = grpc.aio.server(interceptors=[StatusCodes(STATUS_CODES, ["nouscoder.v1.GenerationService"])])
        policies = Policies(engine)
        service = GenerationServicer(engine, Rollouts(single_turn, engine, policies), policies)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        stack.push_async_callback(server.stop, 0.5)
        channel = open_channel(address)
        stack.push_async_callback(channel.close)
        yield Bench(generation_pb2_grpc.GenerationServiceStub(channel), engine, metrics)


async def until(condition: Callable[[], bool], limit_s: float = 60) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


async def refusal(work: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await work
    return caught.value.code(), caught.value.details() or ""


async def test_generate_needs_a_policy_first(bench: Bench, tmp_path: Path) -> None:
    code, details = await refusal(bench.generate([task(0)]))
    assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "no policy has been loaded yet")
    assert not (await bench.status()).has_policy
    await bench.update(published(tmp_path, 0))
    assert len(await bench.generate([task(0)])) == 1


async def test_generate_streams_every_rollout_once(bench: Bench, tmp_path: Path) -> None:
    await bench.update(published(tmp_path, 7))
    rollouts = await bench.generate([task(number) for number in range(20)])
    assert sorted(rollout.rollout_id for rollout in rollouts) == sorted(f"r{number}" for number in range(20))
    assert all(rollout.finish_reason is FinishReason.STOP and rollout.text for rollout in rollouts)
    assert {rollout.oldest_version for rollout in rollouts} == {7}
    status = await bench.status()
    assert (status.engine, status.policy_version, status.running_rollouts) == ("fake", 7, 0)
    assert status.num_tokens == sum(rollout.num_sampled_tokens for rollout in rollouts)
    assert bench.metric("nouscoder_generation_tokens_total") == status.num_tokens


async def test_generate_names_a_task_that_cannot_be_sampled(bench: Bench, tmp_path: Path) -> None:
    await bench.update(published(tmp_path, 0))
    code, details = await refusal(bench.generate([task(0), task(1, prompt="x" * 200), task(2)]))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "request r1" in details
    await until(lambda: bench.engine.num_running + bench.engine.num_waiting == 0)


async def test_a_cancelled_call_cancels_its_tasks(bench: Bench, tmp_path: Path) -> None:
    await bench.update(published(tmp_path, 0))
    await bench.engine.pause(60)
    call = bench.stub.Generate(generation_pb2.GenerateRequest(tasks=[TASK.to(task(n)) for n in range(6)]))
    reading = asyncio.ensure_future(call.read())
    await until(lambda: bench.engine.num_waiting == 6)
    reading.cancel()
    call.cancel()
    await until(lambda: bench.engine.num_running + bench.engine.num_waiting == 0)
    await bench.engine.resume()
    (rollout,) = await bench.generate([task(7)])
    assert bench.engine.num_tokens == rollout.num_sampled_tokens, "nothing was sampled for the cancelled tasks"


async def test_a_file_that_differs_from_its_manifest_leaves_the_old_weights(bench: Bench, tmp_path: Path) -> None:
    await bench.update(published(tmp_path, 0))
    good = published(tmp_path, 1)
    (shard,) = good.shards
    faults = {
        "SHA-256": replace(good, shards=(replace(shard, sha256="0" * 64),)),
        "bytes": replace(good, shards=(replace(shard, num_bytes=3),)),
        "is gone": replace(good, folder=str(tmp_path / "nowhere")),
        "cannot be read": replace(good, shards=(replace(shard, name="nothing.safetensors"),)),
        "fetched from the learner": replace(good, transport=Transport.LEARNER),
    }
    for says, manifest in faults.items():
        code, details = await refusal(bench.update(manifest))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert says in details
        assert "learner" in says or manifest.folder in details
    assert (await bench.status()).policy_version == 0
    assert bench.metric("nouscoder_generation_policy_version") == 0


async def test_the_version_never_decreases(bench: Bench, tmp_path: Path) -> None:
    second = published(tmp_path, 2)
    await bench.update(second)
    assert (await bench.update(second)).policy_version == 2  # the policy in use is accepted again
    assert bench.metric("nouscoder_generation_policy_update_seconds_count") == 1
    other = replace(second, shards=(replace(second.shards[0], sha256="0" * 64),))
    for manifest in (published(tmp_path, 1), other):
        code, details = await refusal(bench.update(manifest))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "version 2, which is in use" in details
    assert (await bench.status()).policy_version == 2


async def test_after_a_training_evaluations_go_back_to_an_older_version(bench: Bench, tmp_path: Path) -> None:
    newest, older = published(tmp_path, 2), published(tmp_path, 1)
    await bench.update(newest)
    for manifest, version in ((older, 1), (newest, 2)):
        request = generation_pb2.UpdatePolicyRequest(manifest=MANIFEST.to(manifest), older=True)
        await bench.stub.UpdatePolicy(request)
        (rollout,) = await bench.generate([task(7)])
        assert {span.policy_version for span in rollout.versions} == {version}


async def test_pause_stops_between_two_steps_and_resume_continues(bench: Bench, tmp_path: Path) -> None:
    await bench.update(published(tmp_path, 0))
    await bench.stub.Pause(generation_pb2.GenerationServicePauseRequest(), timeout=60)
    reading = asyncio.ensure_future(bench.generate([task(0)]))
    await until(lambda: bench.engine.num_waiting == 1)
    await until(lambda: bench.metric("nouscoder_generation_idle_seconds_total", reason="paused") > 0)
    status = await bench.status()
    assert status.paused
    assert status.num_tokens == 0
    await bench.update(published(tmp_path, 1))  # weights may change during a pause
    await bench.stub.Resume(generation_pb2.GenerationServiceResumeRequest(), timeout=60)
    (rollout,) = await reading
    assert rollout.oldest_version == 1


@pytest.mark.parametrize("limit_s", [-1.0, 3601.0, float("nan"), float("inf")])
async def test_a_pause_has_a_time_limit_within_bounds(bench: Bench, tmp_path: Path, limit_s: float) -> None:
    await bench.update(published(tmp_path, 0))
    code, details = await refusal(bench.stub.Pause(generation_pb2.GenerationServicePauseRequest(limit_s=limit_s)))
    assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "limit_s must be above 0 and at most 3600")
    await bench.stub.Pause(generation_pb2.GenerationServicePauseRequest(limit_s=0.3), timeout=60)
    assert (await bench.status()).paused
    # The caller sends no Resume.
    assert len(await bench.generate([task(0)])) == 1


async def test_idle_time_is_counted_by_reason(bench: Bench, tmp_path: Path) -> None:
    await until(lambda: bench.metric("nouscoder_generation_idle_seconds_total", reason="no_policy") > 0)
    await bench.update(published(tmp_path, 0))
    await until(lambda: bench.metric("nouscoder_generation_idle_seconds_total", reason="no_tasks") > 0)
    assert bench.metric("nouscoder_generation_idle_seconds_total", reason="paused") == 0
    assert (await bench.status()).idle_s > 0
    assert bench.metric("nouscoder_generation_running_rollouts") == 0


class WatchedEngine(FakeEngine):
    """Records the thread of every call."""

    def __init__(self, threads: set[str]) -> None:
        super().__init__(max_running=2, max_tokens_total=100)
        self._threads = threads

    def add(self, request: SampleRequest) -> None:
        self._threads.add(threading.current_thread().name)
        super().add(request)

    def cancel(self, request_id: str) -> None:
        self._threads.add(threading.current_thread().name)
        super().cancel(request_id)

    def load_policy(self, files: Sequence[Path], policy_version: int) -> None:
        self._threads.add(threading.current_thread().name)
        super().load_policy(files, policy_version)

    def step(self) -> list[tuple[str, Completion]]:
        self._threads.add(threading.current_thread().name)
        return super().step()


async def test_the_engine_is_used_only_by_its_own_thread(tmp_path: Path) -> None:
    threads: set[str] = set()
    async with SteppedEngine(WatchedEngine(threads), GenerationMetrics()) as engine:
        cancelled = engine.sample(request_of(9))
        await engine.load_policy(paths(published(tmp_path, 0)), 0)
        cancelled.cancel()
        await asyncio.gather(*(engine.sample(request_of(number)) for number in range(3)))
    assert threads == {"engine"}


class FailingEngine(FakeEngine):
    """An engine whose logits are NaN."""

    def step(self) -> list[tuple[str, Completion]]:
        raise EngineError("logits that are NaN")


async def test_a_failing_engine_ends_every_wait_with_its_error(tmp_path: Path) -> None:
    step_engine = FailingEngine(max_running=2, max_tokens_total=100)
    async with SteppedEngine(step_engine, GenerationMetrics()) as engine:
        await engine.load_policy(paths(published(tmp_path, 0)), 0)
        with pytest.raises(EngineStopped, match="logits that are NaN"):
            await asyncio.wait_for(engine.sample(request_of(0)), 60)
        with pytest.raises(EngineStopped, match="logits that are NaN"):
            await asyncio.wait_for(engine.failed(), 60)
        with pytest.raises(EngineStopped, match="no longer runs"):
            await asyncio.wait_for(engine.pause(1), 60)


def test_importing_the_service_loads_no_engine() -> None:
    code = "import nouscoder.generation.process, sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "[]"


SERVE = """
import asyncio, sys
from nouscoder.config import load_config
from nouscoder.generation.process import serve
asyncio.run(serve(load_config(None, sys.argv[1:])))
"""


def free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def test_the_process_serves_without_a_broker_and_exits_cleanly_on_sigterm(tmp_path: Path) -> None:
    port, metrics, nobody = free_port(), free_port(), free_port()
    CharTokenizer().save(tmp_path)
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", SERVE, "generation.engine=fake", f"generation.grpc=127.0.0.1:{port}"),
            *(f"generation.metrics=127.0.0.1:{metrics}", f"broker.grpc=127.0.0.1:{nobody}"),
            f"policy.path={tmp_path}",
        ]
    )
    channel = open_channel(f"127.0.0.1:{port}")
    try:
        await asyncio.wait_for(channel.channel_ready(), 240)  # it loads a tokenizer's library
        client = Bench(generation_pb2_grpc.GenerationServiceStub(channel), None, None)  # type: ignore[arg-type]
        await client.update(published(tmp_path, 0))
        assert len(await client.generate([task(0), task(1)])) == 2
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=60) as page:
            assert b'nouscoder_generation_idle_seconds_total{reason="no_tasks"}' in page.read()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0
    finally:
        await channel.close()
        process.kill()
        process.wait()
