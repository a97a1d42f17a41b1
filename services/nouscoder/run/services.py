"""The services of a run, as the loop sees them: its own processes, or given ones that somebody else keeps alive.

`open_services` is the one place that chooses.

INVARIANT: given services are never started, stopped or signalled; one that is away is waited for, `AWAY_LIMIT_S` long
at most, and each time it goes and comes back is told once.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Protocol

from nouscoder.config import Config
from nouscoder.errors import NousCoderError
from nouscoder.run.folder import RunFolder
from nouscoder.run.supervisor import Supervised

AWAY_LIMIT_S = 900.0
_TOLD_AFTER_S = 5.0
LOCAL_TRIES = 3


class ServiceAway(NousCoderError):
    """A given service has been away too long; the message names it."""


class RunServices(Protocol):
    """What the loop needs of the services, whoever runs them. `config` holds the addresses they have."""

    config: Config
    patience_s: float
    watch_every_s: float

    def start(self, *names: str) -> None:
        """From now on these are wanted."""
        ...

    def heard(self, answered: Mapping[str, bool]) -> None:
        """Which services answered just now."""
        ...

    def check(self) -> None:
        """Raises NousCoderError when one of those started cannot be kept alive."""
        ...

    def gives_up(self, num_tries: int, tried_s: float) -> bool:
        """Whether work through them that failed `num_tries` times in `tried_s` seconds is not tried again."""
        ...

    @property
    def processes(self) -> list[Supervised]:
        """Those that are ours, to be shown."""
        ...

    @property
    def learner_ended(self) -> bool:
        """The learner has nothing left to write."""
        ...


class GivenServices:
    """Services at the addresses of the configuration. `say` is told when one goes and comes back."""

    patience_s = AWAY_LIMIT_S
    watch_every_s = 2.0
    processes: list[Supervised] = []  # noqa: RUF012  # none is ours
    learner_ended = True  # it stays; that it has finished the run is the broker's to say

    def __init__(self, config: Config, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._say = say
        self._clock = clock
        self._away_since: dict[str, float] = {}
        self._told: set[str] = set()

    def start(self, *names: str) -> None:
        """They run already; the learner waits for the first evaluation's file in the run folder."""

    def heard(self, answered: Mapping[str, bool]) -> None:
        """Remember who is away since when; an interruption of seconds is not worth a line."""
        now = self._clock()
        for name, is_there in answered.items():
            since = self._away_since.setdefault(name, now)
            if not is_there:
                if now - since >= _TOLD_AFTER_S and name not in self._told:
                    self._told.add(name)
                    self._say(f"the {name} does not answer: waiting up to {self.patience_s:.0f} s for it")
                continue
            del self._away_since[name]
            if name in self._told:
                self._told.discard(name)
                self._say(f"the {name} answers again after {now - since:.0f} s")

    def check(self) -> None:
        """Raises ServiceAway."""
        for name, since in self._away_since.items():
            if self._clock() - since > self.patience_s:
                raise ServiceAway(
                    f"the {name} has not answered for {self.patience_s:.0f} s; nothing of the run is lost: when it is"
                    " back, the same command goes on"
                )

    def gives_up(self, num_tries: int, tried_s: float) -> bool:
        """When they had time enough to come back."""
        return num_tries >= LOCAL_TRIES and tried_s > self.patience_s


@asynccontextmanager
async def open_services(folder: RunFolder, config: Config, say: Callable[[str], None]) -> AsyncIterator[RunServices]:
    """The services of this run; of our own none is left running on leaving."""
    if config.run.services == "given":
        yield GivenServices(config, say)
        return
    # Only here: who attaches to given services needs no Redis, not even its client.
    from nouscoder.run.local import open_local

    async with open_local(folder, config) as services:
        yield services
