"""Measures the start, memory and leases of a broker with 24,000 problems of 200 tests and 2 MB each.

    .venv/bin/python tests/load/many_problems.py FOLDER [--problems 24000] [--tests 200]

The problems share --distinct sets of tests. Each test has 10 kB and compresses well, because 48 GB of text would not
fit on the disk. The index is built from generated problems, and each set of tests is written once. The speed of
building an index from a problem file is measured with --file-problems problems that have their own tests. Then a broker
process starts with the existing index, and the script leases gradings and fetches their tests through a cache of
64 MiB, like a verifier.

The broker starts twice. The first start compiles Python modules (`start_uncompiled_s`). The second one uses compiled
modules (`start_s`), like a broker in an image.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nouscoder.config import load_config
from nouscoder.data.problem_index import build_index, index_key, open_index
from nouscoder.data.problems import save_problems
from nouscoder.domain.lease import RecordedGrading, RecordedGradings
from nouscoder.domain.policy import PolicyManifest, Shard
from nouscoder.domain.problem import Problem
from nouscoder.domain.rollout import assemble_rollout
from nouscoder.domain.submission import StdinCase, StdinTests, Tests
from nouscoder.domain.tokens import Completion, FinishReason, VersionSpan, float32, int32
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.pairs import HEADER, LEASED_GRADINGS
from nouscoder.store.blobs import open_blobs
from nouscoder.store.rollout_record import encode_rollout
from nouscoder.store.tests import StoredTests, TestStore
from nouscoder.store.tests_cache import TestsCache

CACHE_BYTES = 64 * 1024**2
INPUT_BYTES = 10_000


class OnceStore(TestStore):
    """Writes only the first `num_distinct` sets of tests, because the sets repeat in the same order."""

    def __init__(self, folder: Path, num_distinct: int) -> None:
        super().__init__(open_blobs(str(folder)))
        self._num_distinct = num_distinct
        self._written: list[StoredTests] = []
        self._num_asked = 0

    def put(self, tests: Tests, admit: Callable[[StoredTests], None] | None = None) -> StoredTests:
        """See TestStore.put."""
        if self._num_asked < self._num_distinct:
            self._written.append(super().put(tests, admit))
        self._num_asked += 1
        return self._written[(self._num_asked - 1) % self._num_distinct]


def made_tests(number: int, num_tests: int) -> StdinTests:
    """Tests that are unique for this number and compress well."""
    line = f"{number} {number * 7919 % 10007}\n"
    inputs = line * (INPUT_BYTES // len(line))
    return StdinTests(tuple(StdinCase(f"{test}\n{inputs}", f"{number + test}\n") for test in range(num_tests)))


def generated(num_problems: int, num_tests: int, num_distinct: int) -> Iterator[Problem]:
    """Problems. Those from `num_distinct` on have the tests of earlier ones."""
    last = made_tests(0, num_tests)
    for number in range(num_problems):
        if number < num_distinct:
            last = made_tests(number, num_tests)
        yield Problem(f"problem-{number}", f"Problem {number}. " + "Some words. " * 150, last)


def memory_mib(pid: int, field: str) -> float:
    """VmRSS (current resident memory) or VmHWM (its peak) of a process [MiB]."""
    return int(Path(f"/proc/{pid}/status").read_text().split(f"{field}:")[1].split()[0]) / 1024


def build(folder: Path, problems: Iterator[Problem], num_distinct: int) -> float:
    """Seconds to build the index and the test store of these problems. The problem file is empty."""
    file = folder / "train.jsonl"
    file.touch()
    index = folder / "train.jsonl.index"
    begun_s = time.monotonic()
    build_index(problems, index / "problems.sqlite", OnceStore(index, num_distinct), index_key(file, str(index)))
    return time.monotonic() - begun_s


def build_from_file(folder: Path, num_problems: int, num_tests: int) -> float:
    """Seconds to build an index from a problem file."""
    save_problems(folder / "train.jsonl", generated(num_problems, num_tests, num_problems))
    begun_s = time.monotonic()
    open_index(load_config(None, [f"problems.train={folder / 'train.jsonl'}"])).close()
    return time.monotonic() - begun_s


def start_broker(folder: Path) -> tuple[subprocess.Popen[bytes], str, float]:
    """Start a broker. Returns the process, its address, and the seconds until it answers."""
    settings = [f"problems.train={folder / 'train.jsonl'}", f"run.root={folder}", "broker.grpc=127.0.0.1:0"]
    settings.append(f"run.name=load-{secrets.token_hex(3)}")  # a run that was used before would have no more tasks
    command = [sys.executable, "-m", "nouscoder", "serve", "broker", *(f"--set={one}" for one in settings)]
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    begun_s = time.monotonic()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | bytecode)
    assert process.stderr is not None
    for line in process.stderr:
        if b"broker ready" in line:
            return process, json.loads(line)["address"], time.monotonic() - begun_s
    raise SystemExit("the broker did not start")


def stop_broker(process: subprocess.Popen[bytes]) -> None:
    """Stop the broker and wait until it exits."""
    process.terminate()
    process.communicate(timeout=60)


async def work(address: str, folder: Path, num_gradings: int) -> dict[str, Any]:
    """Submit rollouts, lease their gradings, and fetch their tests through a small cache."""
    async with BrokerClient(address, "load-h-0-1") as broker:
        await broker.publish_policy(PolicyManifest(0, 0, "/policies/0", (Shard("a.safetensors", "a" * 64, 1),)))
        tasks = (await broker.lease_tasks(num_gradings)).tasks
        rollouts = []
        for item in tasks:
            ids = int32([3, 4])
            sampled = Completion(ids, float32([-0.5, -0.5]), (VersionSpan(0, 2),), FinishReason.STOP)
            rollouts.append((item.lease.lease_id, assemble_rollout(item.task, [ids, sampled], "print(1)")))
        assert not await broker.submit_rollouts(rollouts)
        gradings = (await broker.lease_grading(num_gradings)).gradings
        cache = TestsCache(folder / "cache", CACHE_BYTES)
        most, begun_s = 0, time.monotonic()
        for digest in dict.fromkeys(item.tests_digest for item in gradings):
            async with cache.opened(digest, broker) as tests:
                assert isinstance(tests, StdinTests)
                assert tests.cases[len(tests.cases) // 2].input
            most = max(most, on_disk(folder / "cache"))
        took_s = time.monotonic() - begun_s
        cache.close()
    first, (header, _) = gradings[0], encode_rollout(rollouts[0][1])
    recorded = RecordedGrading(first.lease, HEADER.encode(header), "record", first.tests_digest, first.rules)
    message = LEASED_GRADINGS.to(RecordedGradings((recorded,)))
    return {
        "gradings": len(gradings),
        "lease_bytes": message.ByteSize(),
        "fetch_and_open_s": round(took_s, 3),
        "cache_bytes": most,
        "cache_bound_bytes": CACHE_BYTES,
    }


def on_disk(folder: Path) -> int:
    """The total size of all files in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    """Run all measurements and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--problems", type=int, default=24_000)
    parser.add_argument("--tests", type=int, default=200)
    parser.add_argument("--distinct", type=int, default=2000)
    parser.add_argument("--file-problems", type=int, default=200)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {"problems": asked.problems, "tests_a_problem": asked.tests}
    figures["distinct"] = asked.distinct
    if not (asked.folder / "train.jsonl.index" / "problems.sqlite").exists():
        figures["build_s"] = round(
            build(asked.folder, generated(asked.problems, asked.tests, asked.distinct), asked.distinct), 1
        )
        (asked.folder / "file").mkdir(exist_ok=True)
        from_file_s = build_from_file(asked.folder / "file", asked.file_problems, asked.tests)
        figures["from_file_problems_per_s"] = round(asked.file_problems / from_file_s, 1)
    figures["index_bytes"] = (asked.folder / "train.jsonl.index" / "problems.sqlite").stat().st_size
    process, _, uncompiled_s = start_broker(asked.folder)
    stop_broker(process)
    process, address, start_s = start_broker(asked.folder)
    try:
        figures |= {"start_uncompiled_s": round(uncompiled_s, 2), "start_s": round(start_s, 2)}
        figures |= {"rss_after_start_mib": round(memory_mib(process.pid, "VmRSS"), 1)}
        figures |= asyncio.run(work(address, asked.folder, 192))
        figures["peak_rss_mib"] = round(memory_mib(process.pid, "VmHWM"), 1)
    finally:
        stop_broker(process)
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
