"""A sandbox that records the output of each run by its input.

INVARIANT: each run in a session inside a `recorded()` block, also in tasks started there, is recorded exactly in that
block's record. The runs are those of the inner sandbox, unchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

from nouscoder.verifier.sandbox.base import NO_FILES, Program, RunResult, SandboxDecorator, Session

Outputs = dict[bytes, set[bytes]]  # digests of outputs, by the digest of the input

_record: ContextVar[Outputs | None] = ContextVar("outputs", default=None)


@contextmanager
def recorded() -> Iterator[Outputs]:
    """Record the runs of this task, and of the tasks that it starts, inside the block."""
    outputs: Outputs = {}
    token = _record.set(outputs)
    try:
        yield outputs
    finally:
        _record.reset(token)


def digest(*parts: bytes) -> bytes:
    """A digest of several byte strings that depends on where each one ends."""
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(len(part).to_bytes(8, "little") + part)
    return made.digest()


class RecordingSandbox(SandboxDecorator):
    """Forwards to `inner` and records the runs of sessions. Pairs (for checkers and interactors) are not recorded."""

    @asynccontextmanager
    async def session(self, program: Program) -> AsyncIterator[Session]:
        """See `Sandbox`."""
        async with self._inner.session(program) as session:
            yield _RecordingSession(session)


class _RecordingSession:
    def __init__(self, inner: Session) -> None:
        self._inner = inner

    async def run(
        self, stdin: bytes, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> RunResult:
        """See `Session`."""
        result = await self._inner.run(stdin, args=args, files=files)
        outputs = _record.get()
        if outputs is not None:
            outputs.setdefault(digest(stdin), set()).add(digest(result.stdout, result.result or b""))
        return result

    async def dialogue_with(
        self, partner: Session, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> tuple[RunResult, RunResult]:
        """See `Session`. Never called, because pairs return the inner sandbox's own sessions."""
        return await self._inner.dialogue_with(partner, args=args, files=files)
