"""Places of tool sessions: who gets one, which session gives its own up, and when. The clock is the test's."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from hypothesis import example, given
from hypothesis import strategies as st

from nouscoder.http_server.fair_queue import QueueFull
from nouscoder.verifier.tools.places import Sharing, ToolPlace, ToolPlaces

SHARING = Sharing(safe_s=10.0, long_idle_s=60.0, long_open_s=600.0)


@dataclass
class Session:
    """A session of a client, which waits or is open. It leaves when it is told to."""

    task: asyncio.Task[None]
    client: str
    place: ToolPlace | None = None
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    call: AsyncExitStack | None = None


class House:
    """Places and their sessions."""

    def __init__(self, num_places: int, max_waiting: int = 100) -> None:
        self.now_s = 0.0
        self.loads: list[tuple[int, int]] = []
        self.places = ToolPlaces(
            num_places, max_waiting, lambda *load: self.loads.append(load), SHARING, clock=lambda: self.now_s
        )
        self.sessions: list[Session] = []
        self.ended: list[str] = []  # the clients of sessions that were told to end
        self.refused: list[str] = []

    async def come(self, client: str) -> Session:
        """A session asks for a place."""
        session: Session

        async def live() -> None:
            try:
                async with self.places.place(client) as place:
                    session.place = place
                    with place.idle(session.leave.set):
                        await session.leave.wait()
                    if place.is_told:
                        self.ended.append(client)
            except QueueFull:
                self.refused.append(client)

        task = asyncio.create_task(live())
        session = Session(task, client)
        self.sessions.append(session)
        await settle()
        return session

    async def wait(self, seconds: float) -> None:
        """Let time pass, second by second as the timer would."""
        for _ in range(round(seconds)):
            self.now_s += 1.0
            self.places.look()
            await settle()

    def begin_call(self, session: Session) -> None:
        """A call of an open session begins."""
        assert session.place is not None
        session.call = AsyncExitStack()
        session.call.enter_context(session.place.call())

    async def end_call(self, session: Session) -> None:
        """It ends."""
        assert session.call is not None
        await session.call.aclose()
        session.call = None
        await settle()

    @property
    def held(self) -> Counter[str]:
        """Open sessions by client."""
        return Counter(one.client for one in self.sessions if one.place is not None and not one.task.done())

    async def close(self) -> None:
        """Cancel all."""
        for session in self.sessions:
            session.task.cancel()
        await asyncio.gather(*(session.task for session in self.sessions), return_exceptions=True)


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def test_a_client_with_all_places_gives_idle_ones_to_another_until_both_have_their_share() -> None:
    house = House(4)
    for _ in range(6):
        await house.come("alice")
    for _ in range(6):
        await house.come("bob")
    await house.wait(9)
    assert house.held == {"alice": 4}, "a new session is safe"
    await house.wait(1)
    assert house.held == {"alice": 3, "bob": 1}
    await house.wait(9)
    assert house.held == {"alice": 3, "bob": 1}, "for one client one session ends in ten seconds"
    await house.wait(1)
    assert house.held == {"alice": 2, "bob": 2}
    await house.wait(40)
    assert house.held == {"alice": 2, "bob": 2}
    assert house.ended == ["alice", "alice"]
    await house.close()


async def test_the_longest_idle_session_ends_and_never_one_with_a_call() -> None:
    house = House(3)
    busy, old, new = [await house.come("alice") for _ in range(3)]
    house.begin_call(busy)
    await house.wait(20)
    house.begin_call(new)
    await house.end_call(new)
    await house.come("bob")
    assert old.task.done(), "it needs no second look"
    assert not new.task.done()
    await house.close()


async def test_a_client_that_always_calls_ends_a_session_with_its_next_call() -> None:
    house = House(2)
    alices = [await house.come("alice") for _ in range(2)]
    for one in alices:
        house.begin_call(one)
    await house.come("bob")
    await house.wait(300)
    assert house.held == {"alice": 2}
    await house.end_call(alices[1])
    assert house.held == {"alice": 1, "bob": 1}
    await house.close()


async def test_one_client_alone_never_ends_its_own_sessions() -> None:
    house = House(2)
    for _ in range(5):
        await house.come("alice")
    await house.wait(700)
    assert house.held == {"alice": 2}
    assert not house.ended
    await house.close()


async def test_a_third_client_gets_a_place_that_is_long_idle_or_long_open() -> None:
    house = House(2)
    await house.come("alice")
    bob = await house.come("bob")
    await house.wait(30)
    house.begin_call(bob)
    await house.end_call(bob)
    await house.come("carol")
    await house.wait(29)
    assert house.held == {"alice": 1, "bob": 1}
    await house.wait(1)
    assert house.held == {"bob": 1, "carol": 1}
    for _ in range(53):  # carol and bob call all the time
        await house.wait(10)
        for one in house.sessions:
            if one.client in ("bob", "carol"):
                house.begin_call(one)
                await house.end_call(one)
    dave = await house.come("dave")
    await house.wait(15)
    assert house.ended == ["alice", "bob"], "bob's session is 600 s old"
    assert dave.place is not None
    await house.close()


async def test_a_client_that_comes_and_goes_ends_few_sessions_of_others() -> None:
    house = House(8)
    for _ in range(30):
        await house.come("run")
    await house.wait(60)
    for _ in range(100):  # ten seconds
        guest = await house.come("guest")
        guest.leave.set()
        await settle()
        if not guest.task.done():
            guest.task.cancel()
            await settle()
        house.now_s += 0.1
        house.places.look()
        await settle()
    assert house.ended.count("run") == 1
    await house.close()


async def test_a_free_place_goes_to_the_client_with_the_fewest() -> None:
    house = House(3)
    alices = [await house.come("alice") for _ in range(5)]
    bobs = [await house.come("bob") for _ in range(2)]
    alices[0].leave.set()
    await settle()
    assert house.held == {"alice": 2, "bob": 1}
    alices[1].leave.set()
    await settle()
    assert house.held == {"alice": 2, "bob": 1}, "between equals the one that waits longest"
    alices[2].leave.set()
    await settle()
    assert house.held == {"alice": 1, "bob": 2}
    bobs[0].leave.set()
    await settle()
    assert house.held == {"alice": 2, "bob": 1}
    await house.close()


async def test_a_full_queue_refuses_the_client_with_the_most_waiting() -> None:
    house = House(1, max_waiting=3)
    await house.come("alice")
    for _ in range(4):
        await house.come("alice")
    assert house.refused == ["alice"]
    await house.come("bob")
    assert house.refused == ["alice", "alice"]
    assert house.places.num_waiting == 3
    await house.close()
    assert house.loads[-1] == (0, 0)


Events = list[tuple[str, str, int]]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["come", "come", "leave", "call", "end", "cancel", "wait"]), st.sampled_from("abc")
        ).flatmap(lambda pair: st.tuples(st.just(pair[0]), st.just(pair[1]), st.integers(0, 50))),
        max_size=60,
    )
)
@example([("come", "a", 0), *3 * [("come", "b", 0)], ("wait", "a", 10), ("wait", "a", 50), ("come", "a", 0)])
def test_the_places_hold_their_invariant_in_random_histories(events: Events) -> None:
    asyncio.run(play(events))


async def play(events: Events) -> None:
    house = House(3, max_waiting=8)
    for kind, client, number in events:
        alive = [one for one in house.sessions if one.client == client and not one.task.done()]
        one = alive[number % len(alive)] if alive else None
        held, ended = house.held, len(house.ended)
        waiting = [one for one in house.sessions if one.place is None and not one.task.done()]
        clients = {client, *(one.client for one in waiting)}
        if kind == "come":
            await house.come(client)
        elif kind == "wait":
            await house.wait(number)
        elif one is not None and kind == "cancel":
            one.task.cancel()
        elif one is not None and one.place is not None:
            if kind == "leave" and one.call is None:
                one.leave.set()
            elif kind == "call" and one.call is None and not one.place.is_told:
                house.begin_call(one)
            elif kind == "end" and one.call is not None:
                await house.end_call(one)
        await settle()
        assert house.held.total() <= 3
        assert house.places.num_waiting <= 8
        assert all(one.call is None for one in house.sessions if one.place is not None and one.place.is_told)
        if kind != "wait":
            gained = Counter(one.client for one in waiting if one.place is not None)
            for loser in house.ended[ended:]:  # it may have had a place more before it lost one, all in one look
                most = held[loser] + gained[loser] + (kind == "come" and loser == client)
                assert most > min(held[name] for name in clients), "a session ends for a client with fewer"
        if house.places.num_waiting:
            assert house.held.total() == 3, "no place is free while a session waits"
    await house.close()
    assert house.places.num_waiting == 0
    assert house.loads[-1] == (0, 0)
    assert not house.places._open
