"""Slots shared between clients: round robin, bounded, no submission lost."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.http_server import fair_queue
from nouscoder.http_server.fair_queue import JOB_TURN, FairSlots, QueueFull

CLIENTS = "abc"
MAX_WAITING = 6
KINDS = ["come", "come", "leave", "cancel", "extra", "give back"]
Event = tuple[str, int]


@dataclass
class Office:
    """Clients arrive, wait, are served and leave. Records the order of service."""

    slots: FairSlots = field(default_factory=lambda: FairSlots(2, MAX_WAITING, lambda waiting, busy: None))
    waiting: list[tuple[str, asyncio.Task[None]]] = field(default_factory=list)
    inside: list[asyncio.Event] = field(default_factory=list)
    extra: int = 0
    served: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    passed_over: dict[str, dict[str, int]] = field(default_factory=dict)  # waiting client -> others served meanwhile

    async def come(self, client: str) -> None:
        """Handle one submission, from its arrival to its end."""
        try:
            async with self.slots.slot(client):
                self.serve(client)
                leave = asyncio.Event()
                self.inside.append(leave)
                await leave.wait()
        except QueueFull as refusal:
            self.refused.append(client)
            assert refusal.retry_after_s >= 1  # noqa: PT017

    def serve(self, client: str) -> None:
        """Record the client, and the waiting clients that it was served before."""
        self.served.append(client)
        self.passed_over.pop(client, None)
        for other in CLIENTS:
            if other != client and len(self.slots._queues.get(other, ())):
                counts = self.passed_over.setdefault(other, {})
                counts[client] = counts.get(client, 0) + 1
                assert counts[client] <= 1, f"{client} was served twice while {other} waited"
            elif other != client:
                self.passed_over.pop(other, None)


async def play(events: list[Event]) -> Office:
    office = Office()
    tasks: list[asyncio.Task[None]] = []
    for kind, number in events:
        if kind == "come":
            task = asyncio.create_task(office.come(CLIENTS[number % 3]))
            tasks.append(task)
        elif kind == "leave" and office.inside:
            office.inside.pop(number % len(office.inside)).set()
        elif kind == "extra" and office.slots.take_extra():
            assert not office.slots.waiting
            office.extra += 1
        elif kind == "give back" and office.extra:
            office.extra -= 1
            office.slots.give_back_extra()
        elif kind == "cancel" and tasks:
            tasks[number % len(tasks)].cancel()
        for _ in range(4):
            await asyncio.sleep(0)
        for client in CLIENTS:
            if not office.slots._queues.get(client):
                office.passed_over.pop(client, None)
        assert office.extra == office.slots.extra <= office.slots.busy <= 2
        assert office.slots.waiting <= MAX_WAITING
        assert office.slots.waiting == sum(map(len, office.slots._queues.values())) == len(office.slots._asked_s)
        assert office.slots.num_clients == len(office.slots._queues)
        assert (office.slots.oldest_s > 0) is bool(office.slots.waiting)
        assert office.slots.busy == 2 or not office.slots.waiting, "a slot is idle while a client waits"
    for _ in range(office.extra):
        office.slots.give_back_extra()
    while office.slots.busy or office.slots.waiting:
        for leave in office.inside:
            leave.set()
        office.inside.clear()
        for _ in range(4):
            await asyncio.sleep(0)
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [end for end in ends if isinstance(end, Exception)] == []  # a cancellation is no Exception
    cancelled = sum(task.cancelled() for task in tasks)
    assert len(tasks) <= len(office.served) + len(office.refused) + cancelled
    return office


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 20)), max_size=80))
def test_no_other_client_is_served_twice_while_a_client_waits(events: list[Event]) -> None:
    """The invariant of fair_queue.py over any history of arrivals, ends, cancellations and extra slots."""
    slots = asyncio.run(play(events)).slots
    assert (slots.busy, slots.waiting) == (0, 0)


async def test_a_flood_of_one_client_delays_another_client_by_one_turn() -> None:
    slots = FairSlots(1, 100, lambda waiting, busy: None)
    order: list[str] = []

    async def one(client: str) -> None:
        async with slots.slot(client):
            order.append(client)
            await asyncio.sleep(0)

    await asyncio.gather(*(one("flood") for _ in range(50)), *(one("small") for _ in range(5)))
    assert order[:11] == ["flood", *["flood", "small"] * 5]


async def test_a_full_queue_refuses_the_newest_of_the_client_that_fills_it() -> None:
    slots = FairSlots(1, 4, lambda waiting, busy: None)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(slots.slot("flood"))
        served: list[str] = []

        async def one(name: str) -> None:
            async with slots.slot(name.split("-")[0]):
                served.append(name)

        flood = [asyncio.ensure_future(one(f"flood-{n}")) for n in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await one("flood-4")
        small = [asyncio.ensure_future(one(f"small-{n}")) for n in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await one("small-2")
        with pytest.raises(QueueFull):
            await flood[3]
        with pytest.raises(QueueFull):
            await flood[2]
        await stack.aclose()
    await asyncio.gather(*flood[:2], *small)
    assert served == ["flood-0", "small-0", "flood-1", "small-1"]


async def test_an_extra_slot_is_given_only_while_a_slot_is_idle_and_no_submission_waits() -> None:
    slots = FairSlots(2, 4, lambda waiting, busy: None)
    async with slots.slot("a"):
        assert slots.take_extra()
        assert not slots.take_extra(), "none is idle"
        served = asyncio.Event()

        async def other() -> None:
            async with slots.slot("b"):
                served.set()

        task = asyncio.ensure_future(other())
        await asyncio.sleep(0)
        assert (slots.waiting, slots.take_extra()) == (1, False)
        slots.give_back_extra()
        assert not slots.take_extra(), "another submission has it now"
        await asyncio.wait_for(task, 60)
        assert served.is_set()
    assert (slots.busy, slots.extra, slots.waiting) == (0, 0, 0)


async def test_a_submission_that_has_waited_for_its_patience_leaves_the_queue() -> None:
    slots = FairSlots(1, MAX_WAITING, lambda waiting, busy: None)
    async with slots.slot("a"):
        with pytest.raises(QueueFull):
            async with slots.slot("b", patience_s=0.01):
                pytest.fail("there is only one slot")
        assert (slots.waiting, slots.busy) == (0, 1)
    async with slots.slot("b", patience_s=60):
        assert (slots.waiting, slots.busy) == (0, 1)
    assert slots.busy == 0


async def test_slots_that_are_not_usable_are_not_given_and_waiting_submissions_get_them_when_they_come_back() -> None:
    slots = FairSlots(2, MAX_WAITING, lambda waiting, busy: None)
    held: list[int] = []
    release = asyncio.Event()

    async def hold(number: int) -> None:
        async with slots.slot("client"):
            held.append(number)
            await release.wait()

    slots.resize(0)
    tasks = [asyncio.create_task(hold(number)) for number in range(3)]
    await asyncio.sleep(0)
    assert (held, slots.waiting, slots.take_extra()) == ([], 3, False)
    for usable, expected in ((1, [0]), (2, [0, 1]), (9, [0, 1])):  # never more than num_slots
        slots.resize(usable)
        await asyncio.sleep(0)
        assert held == expected
    slots.resize(0)
    release.set()
    await asyncio.gather(*tasks[:2])
    assert (slots.waiting, slots.busy) == (1, 0)  # slots that came free were not given again
    slots.resize(2)
    await tasks[2]
    assert (held, slots.busy) == ([0, 1, 2], 0)


async def served_in_order(slots: FairSlots, names: list[str]) -> list[str]:
    """The order in which submissions get the only slot. Names with `job` are submissions of jobs."""
    order: list[str] = []

    async def one(name: str) -> None:
        async with slots.slot(name, in_background="job" in name):
            order.append(name)
            await asyncio.sleep(0)

    await asyncio.gather(*map(one, names))
    return order


async def test_a_request_waits_for_at_most_one_of_ten_thousand_submissions_of_jobs() -> None:
    order = await served_in_order(FairSlots(1, 20_000, lambda waiting, busy: None), ["job"] * 10_000 + ["small"])
    assert order.index("small") == 1


async def test_submissions_of_jobs_get_a_share_of_the_slots_while_requests_wait() -> None:
    order = await served_in_order(FairSlots(1, 1000, lambda waiting, busy: None), ["a"] * 200 + ["job"] * 50)
    shares = [order[begin : begin + JOB_TURN].count("job") for begin in range(1, 201, JOB_TURN)]
    assert shares == [1] * 20


async def test_the_jobs_of_two_clients_take_turns() -> None:
    order = await served_in_order(FairSlots(1, 1000, lambda waiting, busy: None), ["job1"] * 50 + ["job2"] * 5)
    assert order[1:11] == ["job1", "job2"] * 5


async def test_a_full_queue_refuses_submissions_of_jobs_first() -> None:
    slots = FairSlots(1, 3, lambda waiting, busy: None)
    async with slots.slot("busy"):
        jobs = [asyncio.ensure_future(served_in_order(slots, ["job"])) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await served_in_order(slots, ["job"])
        requests = asyncio.ensure_future(served_in_order(slots, ["a", "b"]))
        for _ in range(9):
            await asyncio.sleep(0)
        refused = [job for job in jobs if job.done() and isinstance(job.exception(), QueueFull)]
        assert len(refused) == 2
    assert await requests == ["a", "b"]
    assert await next(job for job in jobs if job not in refused) == ["job"]


async def test_the_wait_of_each_submission_and_of_the_oldest_one_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(fair_queue, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    waits: list[float] = []
    slots = FairSlots(1, 8, lambda waiting, busy: None, waits.append)

    async def submit(client: str, hold: asyncio.Event) -> None:
        async with slots.slot(client):
            await hold.wait()

    holds = [asyncio.Event() for _ in range(3)]
    tasks = []
    for client, hold in zip("aba", holds, strict=True):
        tasks.append(asyncio.create_task(submit(client, hold)))
        await asyncio.sleep(0)
        clock[0] += 10
    assert (slots.oldest_s, slots.num_clients, waits) == (20, 2, [0])
    for hold, oldest_s in zip(holds, (10, 0, 0), strict=True):
        hold.set()
        for _ in range(4):
            await asyncio.sleep(0)
        assert slots.oldest_s == oldest_s
    await asyncio.gather(*tasks)
    assert waits == [0, 20, 10]
