"""A broker process with a Redis of its own, its workers without engine, sandbox or model, and the controls.

The controls are what Redis and protobuf alone need for the bytes of one rollout.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import redis
from google.protobuf.wrappers_pb2 import BytesValue

from nouscoder.bench.measuring import BenchError, started, usage_of
from nouscoder.broker.redis_server import start_redis
from nouscoder.data.problems import save_problems
from nouscoder.domain.batch import RecordedBatch
from nouscoder.domain.lease import LeasedTask
from nouscoder.domain.policy import PolicyManifest, Shard
from nouscoder.domain.problem import Problem
from nouscoder.domain.rollout import Rollout, assemble_rollout
from nouscoder.domain.submission import StdinCase, StdinTests
from nouscoder.domain.tokens import Completion, FinishReason, VersionSpan, float32, int32
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.store.record_store import ByteRange
from nouscoder.store.rollout_record import decode_rollout

GROUP_SIZE = 8
MAX_TOKENS = 32_768
_VOCABULARY = 151_936
# Rollouts that a worker takes at once: as many as make a message of moderate size, up to this number.
_AT_ONCE = 64
_AT_ONCE_TOKENS = 8 * MAX_TOKENS
_NUM_PROMPT_TOKENS = 16
_WAIT_S = 20.0
_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 \n()[]=+-*:,."


class Samples:
    """Random tokens, log-probabilities and text from one pool, so that no rollout compresses and none is costly."""

    def __init__(self) -> None:
        source = self._source = random.Random(0)
        self._ids = int32(source.choices(range(_VOCABULARY), k=2 * MAX_TOKENS))
        self._logprobs = float32(-source.expovariate(1.0) for _ in range(2 * MAX_TOKENS))
        self._text = "".join(source.choices(_ALPHABET, k=4 * MAX_TOKENS))

    def rollout(self, item: LeasedTask, num_tokens: int) -> Rollout:
        """A rollout of `num_tokens` tokens with two characters of text a token, at a random place of the pool."""
        start = self._source.randrange(MAX_TOKENS)
        prompt = self._ids[start : start + _NUM_PROMPT_TOKENS]
        span = slice(start + _NUM_PROMPT_TOKENS, start + num_tokens)
        num_sampled = num_tokens - _NUM_PROMPT_TOKENS
        versions = (VersionSpan(item.task.min_policy_version, num_sampled),)
        sampled = Completion(self._ids[span], self._logprobs[span], versions, FinishReason.STOP)
        return assemble_rollout(item.task, [prompt, sampled], self._text[2 * start : 2 * (start + num_tokens)])


def manifest(version: int) -> PolicyManifest:
    """A policy that nobody reads."""
    return PolicyManifest(version, version, f"/policies/{version}", (Shard("model.safetensors", "a" * 64, 1),))


def _verdict_of(rollout_id: str) -> Verdict:
    """Half of each group is accepted, so that no group is filtered."""
    accepted = int(rollout_id.rpartition("-")[2]) % 2 == 0
    kind = VerdictKind.ACCEPTED if accepted else VerdictKind.WRONG_ANSWER
    return Verdict(kind=kind, passed=int(accepted), total=1, graded=1, duration_s=0.01, backend="bench")


async def sample(client: BrokerClient, samples: Samples, at_once: int, num_tokens: int) -> int:
    """Lease up to `at_once` rollouts and hand them in; returns how many. Raises BenchError."""
    tasks = (await client.lease_tasks(at_once, _WAIT_S)).tasks
    rollouts = [(item.lease.lease_id, samples.rollout(item, num_tokens)) for item in tasks]
    if rollouts and await client.submit_rollouts(rollouts):
        raise BenchError("the broker refused a rollout whose lease was alive")
    return len(rollouts)


async def grade(client: BrokerClient, at_once: int) -> int:
    """Lease up to `at_once` rollouts with their texts and hand in verdicts; returns how many. Raises BenchError."""
    gradings = (await client.lease_grading(at_once, _WAIT_S)).gradings
    verdicts = [(item.lease.lease_id, item.rollout_id, _verdict_of(item.rollout_id)) for item in gradings]
    if verdicts and await client.submit_verdicts(verdicts):
        raise BenchError("the broker refused a verdict whose lease was alive")
    return len(verdicts)


async def fill_batch(
    generation: BrokerClient, verifier: BrokerClient, samples: Samples, num_rollouts: int, num_tokens: int
) -> None:
    """Sample and then grade so many rollouts, a few at a time. Raises BenchError."""
    at_once = min(_AT_ONCE, _AT_ONCE_TOKENS // num_tokens)
    num_done = 0
    while num_done < num_rollouts:
        if not (num_new := await sample(generation, samples, min(at_once, num_rollouts - num_done), num_tokens)):
            raise BenchError(f"the broker gave {num_done} of {num_rollouts} tasks")
        num_done += num_new
    num_done = 0
    while num_done < num_rollouts:
        if not (num_new := await grade(verifier, at_once)):
            raise BenchError(f"the broker gave {num_done} of {num_rollouts} rollouts to grade")
        num_done += num_new


async def train(client: BrokerClient, num_rollouts: int, num_tokens: int) -> int:
    """Lease a batch, read its records, commit it; answers their bytes. Raises BenchError."""
    batch = (await client.lease_batch()).batch
    if batch is None or len(batch.rollouts) != num_rollouts:
        raise BenchError(f"the broker gave no batch of {num_rollouts} rollouts")
    num_bytes = await read_records(client, batch, num_tokens)
    await client.commit_batch(batch.batch_id, batch.batch_id + 1)
    return num_bytes


async def read_records(client: BrokerClient, batch: RecordedBatch, num_tokens: int) -> int:
    """Stream and decode the records of a batch; answers their bytes. Raises BenchError."""
    ranges = [ByteRange(recorded.record, 0, recorded.header.record_bytes) for recorded in batch.rollouts]
    place, record, num_whole, num_bytes = 0, bytearray(), 0, 0
    async for at, data in client.stream_records(ranges):
        if at != place:
            place, record = at, bytearray()
        record += data
        num_bytes += len(data)
        if len(record) == ranges[at].num_bytes:
            rollout = decode_rollout(bytes(record))
            expected = batch.rollouts[at].header.rollout_id
            if (rollout.rollout_id, len(rollout.token_ids)) != (expected, num_tokens):
                raise BenchError(f"record {at} of the batch is not that of rollout {expected}")
            num_whole += 1
    if num_whole != len(ranges):
        raise BenchError(f"{num_whole} of {len(ranges)} records came whole")
    return num_bytes


_START_LIMIT_S = 600.0  # the index of 24,000 problems is built first
_DELETION_LIMIT_S = 120.0
_KEY = "nouscoder:bench:control"
_CHUNK_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True)
class RunningBroker:
    """A broker process and its Redis."""

    pid: int
    address: str
    redis: redis.Redis

    def cpu_s(self) -> float:
        """CPU seconds of the broker process so far."""
        return usage_of(self.pid).own_cpu_s

    def all_cpu_s(self) -> float:
        """CPU seconds of the broker process and of Redis so far."""
        used = self.redis.info("cpu")
        return self.cpu_s() + float(used["used_cpu_sys"]) + float(used["used_cpu_user"])

    def redis_commands(self) -> int:
        """Commands that Redis has run, those inside of scripts among them."""
        return int(self.redis.info("stats")["total_commands_processed"])

    def redis_bytes(self) -> int:
        """What Redis holds, by its own account."""
        return int(self.redis.info("memory")["used_memory"])

    def problem_statistics(self) -> tuple[int, int]:
        """How many problems have statistics, and the bytes of all of them in Redis."""
        (key,) = self.redis.scan_iter("*}:problem_statistics", count=10_000)
        return int(self.redis.hlen(key)), int(self.redis.memory_usage(key, samples=0) or 0)

    async def wait_until_deleted(self) -> None:
        """Return when Redis holds no record. Raises BenchError when that takes too long."""
        async with asyncio.timeout(_DELETION_LIMIT_S):
            while next(self.redis.scan_iter("*}:record:*", count=10_000), None) is not None:
                await asyncio.sleep(0.05)


@asynccontextmanager
async def running_broker(batch: int, *overrides: str, num_problems: int = 1) -> AsyncIterator[RunningBroker]:
    """A broker process with a Redis of its own, in a folder that goes away. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="nouscoder-bench-") as name:
        folder = Path(name)
        tests = StdinTests((StdinCase("1\n", "1\n"),))
        save_problems(folder / "train.jsonl", (Problem(f"p{i}", "A problem.", tests) for i in range(num_problems)))
        server = await asyncio.to_thread(start_redis, folder / "redis")
        settings = [f"problems.train={folder / 'train.jsonl'}", f"run.root={folder}", f"broker.redis_url={server.url}"]
        settings += ["broker.grpc=127.0.0.1:0", f"broker.group_size={GROUP_SIZE}", f"broker.batch_size={batch}"]
        settings += ["broker.pipeline_k=2", *overrides]
        command = [sys.executable, "-m", "nouscoder", "serve", "broker", *(f"--set={setting}" for setting in settings)]
        texts = ("the broker ended while it started", "the broker took too long to start, or to delete records")
        try:
            async with started(command, "grpc", _START_LIMIT_S, *texts) as (pid, address):
                with redis.Redis.from_url(server.url) as client:
                    yield RunningBroker(pid, address, client)
        finally:
            await asyncio.to_thread(server.close)


def bare_redis_ms(client: redis.Redis, num_bytes: int, times: int) -> float:
    """Milliseconds of SET, GET, GET, DEL of that many bytes."""
    record = os.urandom(num_bytes)
    begun_s = time.perf_counter()
    for _ in range(times):
        client.set(_KEY, record)
        client.get(_KEY)
        client.get(_KEY)
        client.delete(_KEY)
    return 1000 * (time.perf_counter() - begun_s) / times


def bare_protobuf_cpu_ms(num_bytes: int, times: int) -> float:
    """CPU milliseconds to parse a message with that many bytes, and to write them into messages of a chunk each."""
    message = BytesValue(value=os.urandom(num_bytes)).SerializeToString()
    begun_s = time.process_time()
    for _ in range(times):
        record = BytesValue.FromString(message).value
        for start in range(0, num_bytes, _CHUNK_BYTES):
            BytesValue(value=record[start : start + _CHUNK_BYTES]).SerializeToString()
    return 1000 * (time.process_time() - begun_s) / times
