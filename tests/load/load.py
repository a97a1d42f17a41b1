"""The overload of test_overload.py: the grading service under several times its capacity, from several clients.

It checks that nothing crashes, that no answer is lost, duplicated or mixed up, that refusals are 429 with a
Retry-After, that the clients get equal shares, and that every verdict equals that of an idle service. Client and
service share the cores of this machine, and the cache is off.

1. Grade all submissions once, one per slot at a time. The verdicts must be the expected ones.
2. Grade them again while some always wait. The capacity in submissions per second is the higher rate of the two.
3. For `num_seconds`, clients with a token each send `overload` times the capacity at random times. The rate rises when
   the service shows a higher capacity. Refused submissions that are sent again count as requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tests.load.hostile import hostile_mixture
from tests.load.lean_client import LeanClient
from tests.load.load_client import Graded, OpenLoopClient, graded
from tests.load.load_pace import Pace
from tests.load.load_result import LoadPlan, LoadResult, figures
from tests.load.load_watch import Holding, first_and_last, watch
from tests.load.mixture import Sample, mixture

from nouscoder.bench.http_load import LoadFault
from nouscoder.bench.measuring import BenchError
from nouscoder.bench.verifier import running_service
from nouscoder.client.calls import GRADE_PATH
from nouscoder.http_server.api_keys import new_api_key
from nouscoder.progress_bar import progress_bar
from nouscoder.verifier.toolchains.languages import installed

_WINDOW_S = 60.0  # the first and the last minute
_ANSWER_LIMIT_S = 180.0
_SCRAPE_LIMIT_S = 30.0

Key = TypeVar("Key", int, str)


@dataclass(frozen=True, slots=True)
class _Service:
    """A running service and the tokens of its clients."""

    pid: int
    url: str
    secrets: Mapping[str, str]

    def client(self, name: str) -> LeanClient:
        """An HTTP client with the token of this name."""
        return LeanClient(self.url, {"Authorization": f"Bearer {self.secrets[name]}"}, limit_s=_ANSWER_LIMIT_S)

    async def counts(self, metric: str) -> float:
        """The value of a metric of the service, summed over all labels."""
        headers = {"Authorization": f"Bearer {next(iter(self.secrets.values()))}"}
        async with httpx.AsyncClient(base_url=self.url, timeout=_SCRAPE_LIMIT_S, headers=headers) as http:
            page = (await http.get("/metrics")).raise_for_status().text
        samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name == f"nouscoder_verifier_{metric}")

    async def is_ready(self) -> bool:
        """Whether the service answers and accepts submissions."""
        try:
            async with httpx.AsyncClient(base_url=self.url, timeout=_SCRAPE_LIMIT_S) as http:
                return (await http.get("/readyz")).status_code == 200
        except httpx.TransportError:
            return False


@dataclass(frozen=True, slots=True)
class _Idle:
    """The answers of an idle service by submission, and its rates."""

    num_slots: int
    backend: str
    expected: dict[int, Graded]
    idle_per_second: float
    capacity_per_second: float


@dataclass(frozen=True, slots=True)
class _Overload:
    """Measurements taken while the clients sent requests, and from the service's metrics."""

    asked_until_s: float
    wall_s: float
    num_metered: int
    num_internal_errors: int
    held: list[Holding]
    client_cpu_share: float


async def bench_load(plan: LoadPlan, overrides: tuple[str, ...] = ()) -> LoadResult:
    """Start a service, measure its capacity, overload it and stop it. Raises BenchError for a wrong idle verdict."""
    samples = mixture(plan.num_submissions, frozenset(installed()), plan.seed)
    names = [f"client-{index}" for index in range(1, plan.num_clients + 1)]
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(_running(names, plan, overrides))
        https = [await stack.enter_async_context(service.client(name)) for name in names]
        idle = await _learn(service, https[-1], samples, plan)
        pace = Pace(plan, idle.capacity_per_second)
        clients = [
            OpenLoopClient(name, http, own, idle.expected, partial(pace.per_second, index), plan.seed)
            for index, (name, http, own) in enumerate(zip(names, https, _samples_of(plan, samples), strict=True))
        ]
        run = await _overload(service, https, clients, pace, plan)
        num_stray_bytes = sum(http.num_stray_bytes for http in https)
        return _result(plan, idle, clients, pace, run, num_stray_bytes, await service.is_ready())


def _samples_of(plan: LoadPlan, honest: Sequence[Sample]) -> list[Sequence[Sample]]:
    """What each client sends."""
    hostile = [hostile_mixture(plan.num_submissions, plan.seed + index) for index in range(plan.num_hostile)]
    return [*hostile, *[honest] * (plan.num_clients - plan.num_hostile)]


@asynccontextmanager
async def _running(names: Sequence[str], plan: LoadPlan, overrides: tuple[str, ...]) -> AsyncIterator[_Service]:
    """A running service with a token for each name."""
    made = {name: new_api_key(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="nouscoder-load-") as folder:
        tokens = Path(folder) / "tokens"
        tokens.write_text("".join(f"{line}\n" for _, line in made.values()))
        own = (f'verifier.tokens_file="{tokens}"', f"verifier.max_queue={plan.max_queue}")
        async with running_service((*own, *overrides)) as (pid, url):
            yield _Service(pid, url, {name: secret for name, (secret, _) in made.items()})


async def _learn(service: _Service, http: LeanClient, samples: Sequence[Sample], plan: LoadPlan) -> _Idle:
    num_slots = round(await service.counts("sandboxes"))
    with progress_bar("idle", 2 * len(samples)) as advance:
        idle_s, expected, backend = await _grade_all(http, samples, num_slots, advance)
        full_s, again, _ = await _grade_all(http, samples, num_slots + min(plan.max_queue, 2 * num_slots), advance)
    changed = [
        f"submission {number}: {expected[number]}, then {one}"
        for number, one in again.items()
        if one != expected[number]
    ]
    if changed:
        raise BenchError(f"two runs without overload gave different verdicts: {'; '.join(changed[:3])}")
    return _Idle(num_slots, backend, expected, len(samples) / idle_s, len(samples) / min(idle_s, full_s))


async def _grade_all(
    http: LeanClient, samples: Sequence[Sample], at_once: int, advance: Callable[[float], None]
) -> tuple[float, dict[int, Graded], str]:
    """(seconds, answers by number, backend). Raises BenchError for a verdict that is not the expected one."""
    waiting = iter(samples)
    answers: dict[int, Graded] = {}
    backends: set[str] = set()

    async def sender() -> None:
        for sample in waiting:
            status, _, body = await http.post(GRADE_PATH, sample.body)
            if status != 200:
                raise BenchError(f"submission {sample.number}: an idle service answered {status}: {body[:200]!r}")
            answer = json.loads(body)
            if answer["verdict"] != sample.truth:
                raise BenchError(f"submission {sample.number}: expected {sample.truth}, an idle service gave {answer}")
            answers[sample.number] = graded(answer)
            backends.add(answer["backend"])
            advance(1)

    begun_s = time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(sender())
    except* (BenchError, LoadFault) as errors:
        raise BenchError(str(errors.exceptions[0])) from errors
    return time.monotonic() - begun_s, answers, "+".join(sorted(backends))


async def _overload(
    service: _Service, https: Sequence[LeanClient], clients: Sequence[OpenLoopClient], pace: Pace, plan: LoadPlan
) -> _Overload:
    held: list[Holding] = []
    metered, failed = await service.counts("submissions_total"), await service.counts("internal_errors_total")
    begun_s, begun_cpu_s = time.monotonic(), _own_cpu_s()
    samples = watch(service.pid, min(5.0, plan.num_seconds / 20), lambda: sum(http.num_open for http in https), held)
    watching = asyncio.create_task(samples)
    with progress_bar("overload", plan.num_seconds) as advance:
        ticking = asyncio.create_task(_tick(advance, clients, pace))
        try:
            await asyncio.gather(*(client.run(begun_s + plan.num_seconds) for client in clients))
        finally:
            for task in (watching, ticking):
                task.cancel()
            await asyncio.gather(watching, ticking, return_exceptions=True)
    wall_s = time.monotonic() - begun_s
    return _Overload(
        asked_until_s=begun_s + plan.num_seconds,
        wall_s=wall_s,
        num_metered=round(await service.counts("submissions_total") - metered),
        num_internal_errors=round(await service.counts("internal_errors_total") - failed),
        held=held,
        client_cpu_share=(_own_cpu_s() - begun_cpu_s) / wall_s,
    )


def _result(
    plan: LoadPlan,
    idle: _Idle,
    clients: Sequence[OpenLoopClient],
    pace: Pace,
    run: _Overload,
    num_stray_bytes: int,
    still_ready: bool,
) -> LoadResult:
    tallies = [client.tally for client in clients]
    first_refusal_s = min(tally.first_refusal_s for tally in tallies)
    sandboxed = [tally.num_sandboxed(first_refusal_s, run.asked_until_s) for tally in tallies]
    first, last = first_and_last(run.held, min(_WINDOW_S, plan.num_seconds / 4))
    return LoadResult(
        backend=idle.backend,
        num_cores=os.cpu_count() or 1,
        num_slots=idle.num_slots,
        plan=plan,
        idle_per_second=idle.idle_per_second,
        capacity_per_second=pace.capacity_per_second,
        wall_s=run.wall_s,
        verdicts=_added(Counter([one.verdict]) for one in idle.expected.values()),
        clients=tuple(
            figures(client.name, client.tally, plan.num_seconds, count, sum(sandboxed), index < plan.num_hostile)
            for index, (client, count) in enumerate(zip(clients, sandboxed, strict=True))
        ),
        statuses=_added(tally.statuses for tally in tallies),
        retry_after_s=_added(tally.retry_after_s for tally in tallies),
        num_unanswered=sum(tally.num_sent - tally.num_ended for tally in tallies),
        num_faults=sum(tally.num_faults for tally in tallies),
        num_wrong=sum(tally.num_wrong for tally in tallies),
        num_metered=run.num_metered,
        num_internal_errors=run.num_internal_errors,
        num_stray_bytes=num_stray_bytes,
        still_ready=still_ready,
        first_minute=first,
        last_minute=last,
        peak_memory_bytes=max(one.memory_bytes for one in run.held),
        client_cpu_share=run.client_cpu_share,
        notes=tuple(note for tally in tallies for note in tally.notes),
    )


def _added(counters: Iterable[Counter[Key]]) -> dict[Key, int]:
    total: Counter[Key] = Counter()
    for counter in counters:
        total.update(counter)
    return dict(sorted(total.items()))


async def _tick(advance: Callable[[float], None], clients: Sequence[OpenLoopClient], pace: Pace) -> None:
    """Report the verdicts to `pace` and advance the progress bar, once per second."""
    while True:
        pace.note(time.monotonic(), sum(len(client.tally.latencies_s) for client in clients))
        await asyncio.sleep(1)
        advance(1)


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
