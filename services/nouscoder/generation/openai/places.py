"""Places for the requests of the API in progress, shared fairly by clients.

INVARIANT: at most `most` requests have a place. When all are taken, a client gets the place of another one's newest
request if that one has asked for more completions than the client has, with its new request. So no client keeps others
out, not even with one request for many. The request that loses its place is cancelled, and can be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class PlaceTaken(Exception):
    """The request has no place, or has none any more."""

    def __init__(self, num_places: int) -> None:
        super().__init__(f"{num_places} requests are in progress, the most that are taken; retry later")


class RequestPlace:
    """That of one request, once it is taken."""

    def __init__(self, places: RequestPlaces, client: str) -> None:
        self._places = places
        self._task = asyncio.current_task()
        self.client = client
        self.num_completions = 0
        self.is_lost = False

    def take(self, num_completions: int) -> None:
        """Take it, until the request ends. Raises PlaceTaken when no place is free for this client."""
        self.num_completions = num_completions
        self._places.take(self)

    def lose(self) -> None:
        """Cancel the request."""
        assert self._task is not None
        self.is_lost = self._task.cancel()


class RequestPlaces:
    """Each request is a task of its own."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: dict[str, list[RequestPlace]] = {}  # by client, the oldest first

    @contextmanager
    def place(self, client: str) -> Iterator[RequestPlace]:
        """A place for one request, which takes it when it needs it. Raises PlaceTaken when it is lost."""
        place = RequestPlace(self, client)
        try:
            yield place
        except asyncio.CancelledError:
            if not place.is_lost:
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            raise PlaceTaken(self._most) from None
        finally:
            self._remove(place)

    def take(self, place: RequestPlace) -> None:
        """See `RequestPlace.take`."""
        if sum(map(len, self._taken.values())) >= self._most:
            most = max(self._taken, key=self._asked)
            if self._asked(most) <= self._asked(place.client) + place.num_completions:
                raise PlaceTaken(self._most)
            loser = self._taken[most][-1]
            self._remove(loser)
            loser.lose()
        self._taken.setdefault(place.client, []).append(place)

    def _asked(self, client: str) -> int:
        return sum(place.num_completions for place in self._taken.get(client, ()))

    def _remove(self, place: RequestPlace) -> None:
        own = self._taken.get(place.client, [])
        if place in own:
            own.remove(place)
            if not own:
                del self._taken[place.client]
