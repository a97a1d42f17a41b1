"""The interface to where a pool's runners come from: the Kubernetes API, DNS or Modal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from nouscoder.verifier.sandbox.base import SandboxError


class RunnersUnreachable(SandboxError):
    """The source of the runners (the Kubernetes API, DNS or Modal) does not answer. The message says which and why."""


class RunnersLimited(RunnersUnreachable):
    """The source makes no further runner for now, because of a limit. The message names the limit."""


@dataclass(frozen=True, slots=True)
class Found:
    """A runner as its source reports it. `address` is None while the runner starts.

    After `use_until_s` (by time.monotonic) it takes no new submission, because it will end.
    """

    name: str
    address: tuple[str, int] | None
    use_until_s: float = math.inf


class Source(Protocol):
    """The source of runners. All calls are bounded in time and raise RunnersUnreachable."""

    async def start(self, on_change: Callable[[], None]) -> None:
        """Begin to find runners. `on_change` may be called when the list has changed."""
        ...

    async def list(self) -> Sequence[Found]:
        """The existing runners without the quarantined ones."""
        ...

    async def create(self) -> str | None:
        """Make another runner. Returns its name, or None if the source does not make runners.

        Raises RunnersLimited when a limit forbids it for now.
        """
        ...

    async def remove(self, runner: Found) -> None:
        """End a runner."""
        ...

    async def quarantine(self, runner: Found) -> None:
        """Take a runner out of use, but keep it for inspection."""
        ...

    async def lacked_memory(self, runner: Found) -> bool:
        """Whether a runner was killed because it reached its memory limit. False where the source cannot tell.

        Waits some seconds for the news, because a connection may end earlier.
        """
        ...

    async def close(self) -> None:
        """End the runners that this source has made."""
        ...
