"""Mutated requests of every kind to a running service: no 5xx of its own, no INTERNAL, and it still grades.

Each part is one task: REST bodies (grade, stream, batch, run_code, submit, get_reward, tests, jobs), raw HTTP with
wrong lengths and connections that end early, and all gRPC methods.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol

import grpc
import httpx
import pytest
from tests.fuzz.live_seeds import BODIES, CELLS, MESSAGES, QUERIES, heavy_body, heavy_message, heavy_tests, mutated

ANSWER_S = 120.0
DEADLINE_S = "8"
OF_THE_CLIENT = "Internal error from Core"  # grpc.aio says it when the call has ended before all messages are written
_GRADING = ("/v1/grade", "/v1/grade/stream", "/v1/grade/batch")
_HEAVY_SHARE = 0.02  # of these requests, and of the calls of Grade
NUM_REST, NUM_RAW, NUM_GRPC = 4, 2, 3


class Verifier(Protocol):
    """See conftest.py."""

    http: str
    grpc: str
    url: str


class Budget(Protocol):
    """See conftest.py."""

    live_s: int
    thorough: bool


class Fuzzing:
    """The tasks' common end, and the counts of what was answered."""

    def __init__(self, verifier: Verifier, seconds: float) -> None:
        self.verifier = verifier
        self.end_s = time.monotonic() + seconds
        self.answers: Counter[str] = Counter()
        self.faults: list[str] = []

    def goes_on(self) -> bool:
        """Whether there is time left."""
        return time.monotonic() < self.end_s and len(self.faults) < 10

    async def rest(self, draw: random.Random) -> None:
        """Mutated bodies, and the calls of jobs with mutated ids."""
        async with httpx.AsyncClient(base_url=self.verifier.url, timeout=ANSWER_S) as http:
            while self.goes_on():
                path = draw.choice([*BODIES, "/v1/jobs/x", "/v1/jobs"])
                if path == "/v1/jobs/x" or (path == "/v1/jobs" and draw.random() < 0.5):
                    await self._look_at_jobs(http, draw)
                    continue
                body = mutated(draw.choice(BODIES[path]), draw)
                if path in _GRADING and draw.random() < _HEAVY_SHARE:
                    body = heavy_body(draw)
                if path == "/v1/tests" and draw.random() < _HEAVY_SHARE:
                    body = heavy_tests(draw)
                headers = {"X-Deadline-S": draw.choice((DEADLINE_S, DEADLINE_S, "0.01", "nan"))}
                if path == "/v1/jobs":
                    headers["content-type"] = draw.choice(
                        ("application/x-ndjson", "application/vnd.apache.parquet", "x")
                    )
                method, query = ("PUT" if path == "/v1/tests" else "POST"), draw.choice(QUERIES)
                await self._send(http, method, path + (query if path == "/v1/jobs" else ""), body, headers)

    async def _look_at_jobs(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        jobs = (await http.get("/v1/jobs")).json().get("jobs", [])
        job = (
            draw.choice(jobs)["id"]
            if jobs and draw.random() < 0.8
            else draw.choice(("..%2f..", "x" * 999, "%00", "a/b"))
        )
        method, path = draw.choice((("GET", ""), ("GET", "/results"), ("DELETE", "")))
        query = draw.choice(tuple(one for one in QUERIES if "wait" not in one))
        await self._send(http, method, f"/v1/jobs/{job}{path}{query}", b"", {})

    async def _send(
        self, http: httpx.AsyncClient, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> None:
        answer = await http.request(method, path, content=body, headers=headers)
        asked = "/v1/jobs/ID" if path.startswith("/v1/jobs/") else path.partition("?")[0]
        self.answers[f"{asked} {answer.status_code}"] += 1
        allowed = (503, 504, 501) if path == "/submit" else (503, 504)
        if answer.status_code >= 500 and answer.status_code not in allowed:
            self.faults.append(
                f"{method} {path} {headers}: {answer.status_code} {answer.text[:300]} for {body[:500]!r}"
            )

    async def raw(self, draw: random.Random) -> None:
        """Requests whose head is wrong, or that end early."""
        host, _, port = self.verifier.http.rpartition(":")
        while self.goes_on():
            body = mutated(BODIES["/v1/grade"][0], draw)
            length = draw.choice((len(body), len(body) - 1, len(body) + 9, 1 << 40, -1))
            head = f"POST {draw.choice([*BODIES])} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n".encode()
            head += draw.choice(
                (b"", b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n", b"X: " + b"y" * 70_000)
            )
            data = mutated(head, draw) + b"\r\n\r\n" + body
            said = b""
            with contextlib.suppress(OSError, TimeoutError):
                reader, writer = await asyncio.open_connection(host, int(port))
                async with asyncio.timeout(2.0):
                    writer.write(data[: draw.choice((len(data), len(data) // 2, 20))])
                    await writer.drain()
                    if draw.random() < 0.5:
                        said = await reader.read(200)
                writer.transport.abort()
            status = said[9:12].decode("latin1")
            self.answers[f"raw {status or 'closed'}"] += 1
            if status.startswith("5") and status not in ("503", "504", "501"):
                self.faults.append(f"raw: {said!r} for {data[:500]!r}")

    async def calls(self, draw: random.Random) -> None:
        """Mutated messages to every method."""
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(self.verifier.grpc, options) as channel:
            while self.goes_on():
                name = draw.choice(("Grade", "GradeStream", "GradeBatch", "Interpret", "Capabilities"))
                seeds = CELLS if name == "Interpret" else MESSAGES
                messages = [mutated(draw.choice(seeds), draw) for _ in range(draw.choice((1, 1, 3)))]
                if name == "Grade" and draw.random() < _HEAVY_SHARE:
                    messages = [heavy_message(draw)]
                await self._call(channel, name, messages)

    async def _call(self, channel: Any, name: str, messages: list[bytes]) -> None:
        path, limit_s = f"/nouscoder.v1.VerifierService/{name}", float(DEADLINE_S)

        async def sent() -> AsyncIterator[bytes]:
            for message in messages:
                yield message

        try:
            if name in ("GradeBatch", "Interpret"):
                call: Any = channel.stream_stream(path)(sent(), timeout=limit_s)
            elif name == "GradeStream":
                call = channel.unary_stream(path)(messages[0], timeout=limit_s)
            else:
                await channel.unary_unary(path)(messages[0], timeout=limit_s)
                call = None
            if call is not None:
                async for _ in call:
                    pass
            code = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            code = error.code()
            if error.details() == OF_THE_CLIENT:
                code = grpc.StatusCode.CANCELLED
            elif code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS):
                self.faults.append(f"{name}: {code} {error.details()} for {messages!r}"[:800])
        self.answers[f"{name} {code.name}"] += 1


@pytest.mark.timeout(0)  # the tasks have a common end, and each call a limit
async def test_no_fuzz_of_a_running_service_is_a_failure_of_ours(verifier: Verifier, budget: Budget) -> None:
    fuzzing = Fuzzing(verifier, budget.live_s)
    seed = time.time_ns() if budget.thorough else 1
    tasks: list[tuple[int, Callable[[random.Random], Coroutine[Any, Any, None]]]] = [
        (NUM_REST, fuzzing.rest),
        (NUM_RAW, fuzzing.raw),
        (NUM_GRPC, fuzzing.calls),
    ]
    async with asyncio.TaskGroup() as group:
        for number, task in tasks:
            for index in range(number):
                group.create_task(task(random.Random(f"{seed} {task.__name__} {index}")))
    print(f"seed {seed}: {fuzzing.answers.total()} requests: {dict(sorted(fuzzing.answers.items()))}")
    assert not fuzzing.faults, "\n".join(fuzzing.faults)
    assert fuzzing.answers.total() > 20, "too few requests"
