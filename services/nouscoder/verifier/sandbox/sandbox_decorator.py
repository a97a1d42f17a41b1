"""Base class of the decorators of a sandbox: recording and traces."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

from nouscoder.verifier.sandbox.base import Dialogue, Program, Sandbox, Session


class SandboxDecorator:
    """Forwards everything to `inner`. A subclass overrides `session` or `with_partners`."""

    def __init__(self, inner: Sandbox) -> None:
        self._inner = inner
        self.name = inner.name
        self.num_slots = inner.num_slots

    @property
    def isolation(self) -> tuple[str, ...]:
        """See `Sandbox`."""
        return self._inner.isolation

    @property
    def runners(self) -> Mapping[str, int]:
        """See `Sandbox`."""
        return self._inner.runners

    @property
    def replacements(self) -> Mapping[str, int]:
        """See `Sandbox`."""
        return self._inner.replacements

    async def start(self) -> None:
        """See `Sandbox`."""
        await self._inner.start()

    def session(self, program: Program) -> AbstractAsyncContextManager[Session]:
        """See `Sandbox`."""
        return self._inner.session(program)

    def with_partners(
        self, program: Program, partner: Program, checker: Program | None = None
    ) -> AbstractAsyncContextManager[tuple[Session, ...]]:
        """See `Sandbox`."""
        return self._inner.with_partners(program, partner, checker)

    def dialogue(self, program: Program) -> AbstractAsyncContextManager[Dialogue]:
        """See `Sandbox`."""
        return self._inner.dialogue(program)

    async def close(self) -> None:
        """See `Sandbox`."""
        await self._inner.close()
