"""Runners that somebody else keeps (a Deployment), found by the name of their headless service."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from nouscoder.verifier.runner import greeting
from nouscoder.verifier.sandbox.base import SandboxError
from nouscoder.verifier.sandbox.pool import Found, RunnersUnreachable
from nouscoder.verifier.sandbox.runner_link import connect

_LOOK_UP_LIMIT_S = 5.0


class HeadlessRunners:
    """See `Source`. A worn runner is told to end; whoever keeps it starts its container again.

    Several gateways may find the same runners: each runner serves one at a time and tells the others that it is busy.
    """

    def __init__(self, service: str, port: int, key: bytes) -> None:
        self._service = service
        self._port = port
        self._key = key
        self._quarantined: set[str] = set()

    async def list(self) -> Sequence[Found]:
        """See `Source`: whatever the name resolves to is ready."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_LOOK_UP_LIMIT_S):
                answers = await loop.getaddrinfo(self._service, self._port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as error:
            raise RunnersUnreachable(f"{self._service} does not resolve: {error!r}") from error
        hosts = sorted({str(address[0]) for *_, address in answers})
        return [Found(host, (host, self._port)) for host in hosts if host not in self._quarantined]

    async def create(self) -> str | None:
        """See `Source`: that is another's work."""
        return None

    async def remove(self, runner: Found) -> None:
        """See `Source`."""
        if runner.address is None:
            return
        try:
            limit_s = greeting.LIMIT_S
            link = await connect(runner.address, self._key, greeting.RETIRE, {}, name=runner.name, limit_s=limit_s)
            link.writer.transport.abort()
        except (SandboxError, OSError, TimeoutError):
            return  # it is gone already, or will be found silent again

    async def quarantine(self, runner: Found) -> None:
        """See `Source`: never used again by this gateway."""
        self._quarantined.add(runner.name)

    async def close(self) -> None:
        """See `Source`: nothing was made here."""
