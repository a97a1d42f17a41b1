"""What was shown once and is remembered: checkers of code that accept the right program, setups that run alone.

INVARIANT: of submissions that need the same proof at the same time, one makes it, and the others get its result. One
that ended without a result (a fault of the sandbox, a client that left) is made again by another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from nouscoder.verifier.grading.validation import InvalidSubmission

PROOF_S = 60.0  # more seconds than a program has, because no repetition follows
_MOST = 4096


class Proofs:
    """The keys of what was proven, the newest few thousand."""

    def __init__(self) -> None:
        self._proven: dict[bytes, None] = {}
        self._running: dict[bytes, asyncio.Future[None]] = {}

    async def require(self, key: bytes, prove: Callable[[], Awaitable[None]]) -> None:
        """Return once `prove` has ended for `key`. Raises what it raises."""
        while key not in self._proven:
            other = self._running.get(key)
            if other is None:
                await self._make(key, prove)
            else:
                await asyncio.wait([other])
                if not other.cancelled():
                    other.result()

    async def _make(self, key: bytes, prove: Callable[[], Awaitable[None]]) -> None:
        running = self._running[key] = asyncio.get_running_loop().create_future()
        try:
            await prove()
        except InvalidSubmission as refused:
            running.set_exception(refused)
            running.exception()  # else asyncio reports one that nobody waited for
            raise
        else:
            self._proven[key] = None
            if len(self._proven) > _MOST:
                del self._proven[next(iter(self._proven))]
            running.set_result(None)
        finally:
            del self._running[key]
            running.cancel()
