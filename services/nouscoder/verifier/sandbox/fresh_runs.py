"""Sessions whose runs are in fresh sandboxes, one each: for backends with a container for every test.

INVARIANT: at most one sandbox (or pair) is open at a time, and it serves at most one run of the first program, with
the runs of the partner that follow it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from nouscoder.verifier.sandbox.base import NO_FILES, RunResult, Session

Pair = tuple[Session, ...]


class FreshSandbox:
    """The open sandbox of a submission. `sessions` are those of the program and of its partners."""

    def __init__(self, reopen: Callable[[], AbstractAsyncContextManager[Pair]], stack: AsyncExitStack) -> None:
        self._reopen = reopen
        self._stack = stack
        self._opened: Pair | None = None
        self._is_used = False
        self.sessions: tuple[FreshSession, ...] = ()

    @staticmethod
    @contextlib.asynccontextmanager
    async def opened(reopen: Callable[[], AbstractAsyncContextManager[Pair]]) -> AsyncIterator[FreshSandbox]:
        """Open the first sandbox, so that code that does not compile is found on entry."""
        async with AsyncExitStack() as stack:
            pair = FreshSandbox(reopen, stack)
            opened = await pair.fresh()
            pair.sessions = tuple(FreshSession(pair, index) for index in range(len(opened)))
            pair._is_used = False
            yield pair

    async def fresh(self) -> Pair:
        """The sessions of a sandbox in which the first program has not run yet."""
        if self._is_used or self._opened is None:
            self._opened = None
            await self._stack.aclose()
            self._opened = await self._stack.enter_async_context(self._reopen())
        self._is_used = True
        return self._opened

    async def current(self) -> Pair:
        """The sessions of the sandbox in which the first program has run."""
        return self._opened or await self.fresh()


class FreshSession:
    """Implements `Session`. Raises on a run what the backend raises when it opens a sandbox."""

    def __init__(self, pair: FreshSandbox, index: int) -> None:
        self._pair = pair
        self._index = index

    async def run(
        self, stdin: bytes, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> RunResult:
        """See `Session.run`."""
        sessions = await (self._pair.current() if self._index else self._pair.fresh())
        return await sessions[self._index].run(stdin, args=args, files=files)

    async def dialogue_with(
        self, partner: Session, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> tuple[RunResult, RunResult]:
        """See `Session.dialogue_with`."""
        sessions = await self._pair.fresh()
        return await sessions[0].dialogue(sessions[1], args=args, files=files)
