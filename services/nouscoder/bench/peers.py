"""Other judges that the user has installed, under the load of `nouscoder bench verifier` (`--peer KIND URL`).

A peer gets the same programs and tests, as many at once. It runs one program a request, so a submission is as many
requests as it has tests, one after the other. Its outputs are compared with the expected ones here. Their requests are
written after the APIs that they publish: go-judge's POST /run, SandboxFusion's POST /run_code.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from nouscoder.bench.http_load import LeanClient, LoadFault, is_address
from nouscoder.bench.measuring import BenchError
from nouscoder.errors import WrongUse

_LIMIT_S = 10
_MEMORY_BYTES = 1 << 30
_OUTPUT_BYTES = 64 * 1024
_ROUNDS = 4
_PEER_SHARE = 0.25  # of our submissions, because a peer may be ten times as slow


class PeerKind(StrEnum):
    """A kind of judge whose requests this module can send."""

    GO_JUDGE = "go-judge"
    SANDBOX_FUSION = "sandboxfusion"


@dataclass(frozen=True, slots=True)
class Peer:
    """One judge that is running at `url` (http://HOST:PORT)."""

    kind: PeerKind
    url: str


@dataclass(frozen=True, slots=True)
class PeerThroughput:
    """One kind of load, of which the peer and our service got the same parts in turn."""

    submissions: int
    tests_a_submission: int
    tests_per_second: float
    ours_per_second: float
    ours_multiple: float


@dataclass(frozen=True, slots=True)
class PeerBench:
    """The figures of one peer."""

    kind: str
    url: str
    many_small_tests: PeerThroughput
    one_test_submissions: PeerThroughput


def peer_of(text: str) -> Peer:
    """A peer from KIND=URL. Raises BenchError."""
    kind, _, url = text.partition("=")
    if kind not in list(PeerKind):
        raise WrongUse(f"--peer {kind!r:.40}: the kinds are {', '.join(PeerKind)}, as in --peer go-judge URL")
    if not is_address(url.rstrip("/")):
        raise WrongUse(f"--peer {kind}: {url!r:.80} is not of the form http://host:port")
    return Peer(PeerKind(kind), url.rstrip("/"))


def go_judge_request(code: str, stdin: str) -> tuple[str, bytes]:
    """Path and body of one run. Times in nanoseconds, sizes in bytes."""
    files = [{"content": stdin}, *({"name": name, "max": _OUTPUT_BYTES} for name in ("stdout", "stderr"))]
    command = {
        "args": ["/usr/bin/python3", "main.py"], "env": ["PATH=/usr/bin:/bin"], "files": files,
        "cpuLimit": _LIMIT_S * 10**9, "clockLimit": _LIMIT_S * 10**9, "memoryLimit": _MEMORY_BYTES, "procLimit": 64,
        "copyIn": {"main.py": {"content": code}},
    }  # fmt: skip
    return "/run", json.dumps({"cmd": [command]}).encode()


def go_judge_output(answer: Any) -> str:
    """What the program printed. Raises BenchError when it did not run well."""
    (result,) = answer
    if result["status"] != "Accepted":
        raise BenchError(f"go-judge says {result['status']}: {result.get('error') or result['files'].get('stderr')}")
    return str(result["files"]["stdout"])


def sandbox_fusion_request(code: str, stdin: str) -> tuple[str, bytes]:
    """Path and body of one run."""
    body = {"code": code, "language": "python", "stdin": stdin, "run_timeout": _LIMIT_S}
    return "/run_code", json.dumps(body).encode()


def sandbox_fusion_output(answer: Any) -> str:
    """What the program printed. Raises BenchError when it did not run well."""
    if answer["status"] != "Success":
        raise BenchError(f"SandboxFusion says {answer['status']}: {answer.get('message') or answer.get('run_result')}")
    return str(answer["run_result"]["stdout"])


_FORMS: Mapping[PeerKind, tuple[Callable[[str, str], tuple[str, bytes]], Callable[[Any], str]]] = {
    PeerKind.GO_JUDGE: (go_judge_request, go_judge_output),
    PeerKind.SANDBOX_FUSION: (sandbox_fusion_request, sandbox_fusion_output),
}


LoadOurs = Callable[[int, int], Awaitable[float]]


class PeerLoad:
    """Loads one peer. `submissions` makes the next `n` submissions of `m` tests, as the service gets them."""

    def __init__(
        self, peer: Peer, client: LeanClient, submissions: Callable[[int, int], list[Mapping[str, Any]]], at_once: int
    ) -> None:
        self._peer = peer
        self._client = client
        self._submissions = submissions
        self._at_once = at_once

    async def warm_up(self) -> None:
        """Use every worker of the peer. Raises BenchError when it does not answer as its kind does."""
        await self._load(self._submissions(2 * (os.cpu_count() or 1), 2))

    async def bench(self, num_many: int, num_single: int, load_ours: LoadOurs) -> PeerBench:
        """Both kinds of load: so many of our submissions of 50 tests, and of one test."""
        many = await self.throughput(num_many, 50, load_ours)
        return PeerBench(self._peer.kind, self._peer.url, many, await self.throughput(num_single, 1, load_ours))

    async def throughput(self, num_submissions: int, num_tests: int, load_ours: LoadOurs) -> PeerThroughput:
        """The peer and our service in turn, so that a slower moment of the machine affects both.

        `load_ours` sends so many submissions of so many tests to our service, and returns the seconds that it took.
        """
        each = max(1, round(num_submissions * _PEER_SHARE / _ROUNDS))
        wall_s, ours_s = 0.0, 0.0
        for _ in range(_ROUNDS):
            wall_s += await self._load(self._submissions(each, num_tests))
            ours_s += await load_ours(each, num_tests)
        num_done = _ROUNDS * each
        num_runs = num_done * num_tests
        return PeerThroughput(num_done, num_tests, num_runs / wall_s, num_runs / ours_s, wall_s / ours_s)

    async def _load(self, submissions: list[Mapping[str, Any]]) -> float:
        prepared = iter([list(self._requests(submission)) for submission in submissions])
        begun = time.perf_counter()

        async def sender() -> None:
            for requests in prepared:
                for path, body, expected in requests:
                    status, answer = await self._client.post(path, body)
                    text = answer.decode("utf8", "replace")
                    if status != 200:
                        raise BenchError(f"HTTP {status}: {text:.200}")
                    _, output_of = _FORMS[self._peer.kind]
                    try:
                        output = output_of(json.loads(answer))
                    except (ValueError, TypeError, KeyError, AttributeError):
                        raise BenchError(f"not an answer of its kind: {text:.200}") from None
                    if output.split() != expected.split():
                        raise BenchError(f"a right program printed {output!r:.100}, not {expected!r:.100}")

        fault: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._at_once):
                    group.create_task(sender())
        except* (BenchError, LoadFault) as failed:
            fault = failed.exceptions[0]
        if fault is not None:
            raise BenchError(f"{self._peer.kind} at {self._peer.url}: {fault}") from None
        return time.perf_counter() - begun

    def _requests(self, submission: Mapping[str, Any]) -> Iterator[tuple[str, bytes, str]]:
        make_request, _ = _FORMS[self._peer.kind]
        for case in submission["tests"]["cases"]:
            yield *make_request(submission["code"], case["input"]), case["output"]


def as_lines(bench: PeerBench) -> Iterator[str]:
    """The figures as readable lines."""
    yield f"{bench.kind} at {bench.url}, the same programs and tests, one request a test:"
    for name, load in (("many small tests", bench.many_small_tests), ("one-test", bench.one_test_submissions)):
        ours = f"{load.ours_per_second:.0f}, {load.ours_multiple:.1f}x"
        yield f"  {name}: {load.tests_per_second:.0f} tests/s; ours in turn {ours}"
