"""A broker process with a Redis of its own, for measurements."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from nouscoder.bench.broker_workers import GROUP_SIZE
from nouscoder.bench.measuring import BenchError, usage_of
from nouscoder.broker.redis_server import RedisServer, start_redis
from nouscoder.data.problems import save_problems
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import StdinCase, StdinTests

_START_LIMIT_S = 600.0  # the index of 24,000 problems is built first
_DELETION_LIMIT_S = 120.0


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
        try:
            async with _started([*settings, "broker.pipeline_k=2", *overrides], server) as broker:
                yield broker
        finally:
            await asyncio.to_thread(server.close)


@asynccontextmanager
async def _started(settings: list[str], server: RedisServer) -> AsyncIterator[RunningBroker]:
    command = [sys.executable, "-m", "nouscoder", "serve", "broker", *(f"--set={setting}" for setting in settings)]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(_START_LIMIT_S):
            while line := await process.stderr.readline():
                if b'"broker ready"' in line:
                    break
            else:
                raise BenchError("the broker ended while it started")
        drain = asyncio.create_task(process.stderr.read())
        with redis.Redis.from_url(server.url) as client:
            yield RunningBroker(process.pid, json.loads(line)["address"], client)
        drain.cancel()
    except TimeoutError:
        raise BenchError("the broker took too long to start, or to delete records") from None
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
