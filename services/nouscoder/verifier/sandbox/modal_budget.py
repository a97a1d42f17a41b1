"""Whether another container may be made, and what all of them cost. Pure: the caller gives the time in seconds.

INVARIANT: what has been paid, plus what the living containers cost if each lives as long as it may, is at most
`caps.dollars`. So the cap holds also if the gateway dies, because Modal ends each container after its lifetime. The
living containers are at most `max_containers`, and together cost at most `dollars_per_minute`. In no minute are more
than `creations_per_minute` requested; a request that Modal's client repeats, because Modal asks for it, counts once.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from nouscoder.config import ModalSection

_SHORTEST_LIFE_S = 60  # a container that may live for a shorter time is not worth its start
_MINUTE_S = 60.0
_ROUNDING = 1e-9


class Cap(StrEnum):
    """What keeps another container from being made: the label of a metric."""

    CONTAINERS = "containers"
    CREATIONS = "creations_per_minute"
    DOLLARS_PER_MINUTE = "dollars_per_minute"
    DOLLARS = "dollars"


@dataclass(frozen=True, slots=True)
class _Living:
    begun_s: float
    lifetime_s: float


@dataclass(slots=True)
class Budget:
    """The containers of one service, and the limits of `verifier.sandbox.modal`."""

    caps: ModalSection
    _paid: float = 0.0  # for containers that have ended
    _living: dict[str, _Living] = field(default_factory=dict)
    _creations: deque[float] = field(default_factory=deque)

    def admit(self, name: str, now_s: float) -> int | Cap:
        """Count a new container `name` and return its lifetime in whole seconds, or return the cap that forbids it.

        The lifetime is shorter than `lifetime_s` when the rest of the money does not pay for more.
        """
        while self._creations and self._creations[0] <= now_s - _MINUTE_S:
            self._creations.popleft()
        number = len(self._living) + 1
        if number > self.caps.max_containers:
            return Cap.CONTAINERS
        if number * self.caps.dollars_a_second * _MINUTE_S > self.caps.dollars_per_minute + _ROUNDING:
            return Cap.DOLLARS_PER_MINUTE
        if len(self._creations) >= self.caps.creations_per_minute:
            return Cap.CREATIONS
        left = self.caps.dollars - self.committed()
        affordable_s = left / self.caps.dollars_a_second if self.caps.dollars_a_second else math.inf
        lifetime_s = math.floor(min(self.caps.lifetime_s, affordable_s))
        if lifetime_s < min(_SHORTEST_LIFE_S, self.caps.lifetime_s):
            return Cap.DOLLARS
        self._creations.append(now_s)
        self._living[name] = _Living(now_s, lifetime_s)
        return lifetime_s

    def ended(self, name: str, now_s: float) -> None:
        """Pay for a container that exists no more. Does nothing for one that was paid for already."""
        if (one := self._living.pop(name, None)) is not None:
            self._paid += self._cost(one, now_s)

    def refused(self, name: str) -> None:
        """Forget a container that was never made. Its request still counts for the creations of the minute."""
        self._living.pop(name, None)

    def spent(self, now_s: float) -> float:
        """Dollars for all containers until now. Any thread may call it, so it works on a copy."""
        return self._paid + sum(self._cost(one, now_s) for one in list(self._living.values()))

    def committed(self) -> float:
        """Dollars if every living container lives as long as it may."""
        return self._paid + self.caps.dollars_a_second * sum(one.lifetime_s for one in self._living.values())

    def _cost(self, one: _Living, now_s: float) -> float:
        return self.caps.dollars_a_second * min(one.lifetime_s, max(0.0, now_s - one.begun_s))

    def explain(self, cap: Cap) -> str:
        """One sentence for a person: which cap forbids another container, and its setting."""
        setting = f"verifier.sandbox.modal.{'max_containers' if cap is Cap.CONTAINERS else cap.value}"
        limit = getattr(self.caps, setting.rpartition(".")[2])
        return f"{setting} = {limit:g} allows no further container now ({len(self._living)} exist)"
