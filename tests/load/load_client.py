"""One client of an overload. It sends requests at random times, whether or not earlier ones have been answered.

INVARIANT: every request is counted once, and has exactly one result: a recorded answer, a refusal or a fault. A refused
submission is sent again at most `_MAX_SENDS - 1` times, never before its Retry-After.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.load.lean_client import LeanClient
from tests.load.mixture import Sample

from nouscoder.bench.http_load import LoadFault
from nouscoder.client.calls import GRADE_PATH

_MAX_SENDS = 4
_MAX_NOTES = 20
_MAX_JITTER_S = 0.5


@dataclass(frozen=True, slots=True)
class Graded:
    """The part of an answer that must not depend on the load. `first_failure` is the index of a test, or None."""

    verdict: str
    passed: int
    total: int
    first_failure: int | None


def graded(answer: Mapping[str, Any]) -> Graded:
    """That part of an answer of the API."""
    failure = answer["first_failure"]
    return Graded(answer["verdict"], answer["passed"], answer["total"], None if failure is None else failure["index"])


@dataclass(slots=True)
class Tally:
    """The results of one client's requests."""

    num_sent: int = 0
    num_sent_again: int = 0
    num_given_up: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    retry_after_s: Counter[int] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)  # of answers with a verdict
    sandboxed_at_s: list[float] = field(default_factory=list)  # verdicts except no_code, which needs none
    first_refusal_s: float = math.inf
    num_faults: int = 0
    num_wrong: int = 0
    notes: list[str] = field(default_factory=list)  # messages about the first errors

    def note(self, text: str) -> None:
        """Keep a message if it is one of the first."""
        if len(self.notes) < _MAX_NOTES:
            self.notes.append(text)

    def num_sandboxed(self, begun_s: float, ended_s: float) -> int:
        """The number of verdicts in a period that needed a sandbox."""
        return sum(begun_s <= at_s <= ended_s for at_s in self.sandboxed_at_s)

    @property
    def num_ended(self) -> int:
        """The number of requests with an answer or a fault."""
        return self.statuses.total() + self.num_faults


@dataclass(frozen=True, slots=True, order=True)
class _Again:
    """A refused submission and the time from which it may be sent again."""

    due_s: float
    order: int
    sample: Sample = field(compare=False)
    num_sends: int = field(compare=False)


class OpenLoopClient:
    """The client of one token. `expected` has the result of each submission on an idle service, by its number.
    `per_second` returns the current request rate.
    """

    def __init__(
        self,
        name: str,
        http: LeanClient,
        samples: Sequence[Sample],
        expected: Mapping[int, Graded],
        per_second: Callable[[], float],
        seed: int,
    ) -> None:
        self.name = name
        self.tally = Tally()
        self._http = http
        self._expected = expected
        self._per_second = per_second
        self._draw = random.Random(f"{seed} {name}")
        shuffled = list(samples)
        self._draw.shuffle(shuffled)
        self._fresh = itertools.cycle(shuffled)
        self._again: list[_Again] = []
        self._open: set[asyncio.Task[None]] = set()

    async def run(self, end_s: float) -> None:
        """Send requests until the monotonic time `end_s`, then wait for open ones. Each has a time limit."""
        due_s = time.monotonic()
        while (due_s := due_s + self._draw.expovariate(self._per_second())) < end_s:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            self._send_one()
        if self._open:
            await asyncio.wait(self._open)

    def _send_one(self) -> None:
        """Send a refused submission that is due, else the next one."""
        sample, num_sends = next(self._fresh), 0
        if self._again and self._again[0].due_s <= time.monotonic():
            refused = heapq.heappop(self._again)
            sample, num_sends = refused.sample, refused.num_sends
            self.tally.num_sent_again += 1
        self.tally.num_sent += 1
        task = asyncio.create_task(self._ask(sample, num_sends + 1, f"{self.name}/{self.tally.num_sent}"))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _ask(self, sample: Sample, num_sends: int, request_id: str) -> None:
        begun_s = time.monotonic()
        try:
            status, headers, body = await self._http.post(GRADE_PATH, sample.body, {"X-Request-Id": request_id})
        except LoadFault as fault:
            self.tally.num_faults += 1
            self.tally.note(f"{request_id}: {fault}")
            return
        self.tally.statuses[status] += 1
        if headers.get("x-request-id") != request_id:
            self.tally.num_wrong += 1
            self.tally.note(f"{request_id} got the answer to {headers.get('x-request-id')}")
        elif status == 200:
            self.tally.latencies_s.append(time.monotonic() - begun_s)
            self._compare(sample, json.loads(body), request_id)
        elif status == 429:
            self._refused(sample, headers.get("retry-after", ""), num_sends, request_id)
        else:
            self.tally.note(f"{request_id}: status {status}: {body[:200]!r}")

    def _compare(self, sample: Sample, answer: Mapping[str, Any], request_id: str) -> None:
        got = graded(answer)
        if got.verdict != "no_code":
            self.tally.sandboxed_at_s.append(time.monotonic())
        if not sample.truth:
            if got.verdict in ("accepted", "internal_error"):
                self.tally.num_wrong += 1
                self.tally.note(f"{request_id}: a hostile program gave {got}: {str(answer.get('detail', ''))[:200]}")
            return
        wanted = self._expected[sample.number]
        if got != wanted:
            self.tally.num_wrong += 1
            detail = str(answer.get("detail", ""))[:200]
            self.tally.note(f"{request_id}, submission {sample.number}: {got} under load, {wanted} idle; {detail}")

    def _refused(self, sample: Sample, retry_after: str, num_sends: int, request_id: str) -> None:
        if not (retry_after.isascii() and retry_after.isdigit() and int(retry_after) > 0):
            self.tally.num_wrong += 1
            self.tally.note(f"{request_id}: 429 with Retry-After {retry_after!r}")
            return
        wait_s = int(retry_after)
        self.tally.retry_after_s[wait_s] += 1
        self.tally.first_refusal_s = min(self.tally.first_refusal_s, time.monotonic())
        if num_sends >= _MAX_SENDS:
            self.tally.num_given_up += 1
            return
        due_s = time.monotonic() + wait_s + self._draw.uniform(0, _MAX_JITTER_S)
        heapq.heappush(self._again, _Again(due_s, self.tally.num_sent, sample, num_sends))
