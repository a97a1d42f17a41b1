"""Runners of a Deployment, found by the DNS name of their headless service."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from nouscoder.verifier.runner import handshake
from nouscoder.verifier.sandbox.base import SandboxError
from nouscoder.verifier.sandbox.runners.link import PoolKeys, connect_by_any
from nouscoder.verifier.sandbox.runners.pool import FoundRunner, RunnersUnreachable

_RESOLVE_LIMIT_S = 5.0


class HeadlessRunners:
    """See `Source`. A worn runner gets a request to exit; the kubelet then restarts its container.

    Several gateways may find the same runners. A runner serves one gateway at a time and refuses the others as busy.
    """

    def __init__(self, service: str, port: int, keys: PoolKeys) -> None:
        self._service = service
        self._port = port
        self._keys = keys
        self._quarantined: set[str] = set()

    async def start(self, on_change: Callable[[], None]) -> None:
        """See `Source`. DNS reports no changes, so `on_change` is never called."""

    async def list(self) -> Sequence[FoundRunner]:
        """See `Source`. Every address of the name is a ready runner."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_RESOLVE_LIMIT_S):
                answers = await loop.getaddrinfo(self._service, self._port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as error:
            raise RunnersUnreachable(f"{self._service} does not resolve: {error!r}") from error
        hosts = sorted({str(address[0]) for *_, address in answers})
        return [FoundRunner(host, (host, self._port)) for host in hosts if host not in self._quarantined]

    async def create(self) -> str | None:
        """See `Source`. The Deployment makes the runners, so this returns None."""
        return None

    async def remove(self, runner: FoundRunner) -> None:
        """See `Source`."""
        if runner.address is None:
            return
        try:
            limit_s = handshake.LIMIT_S
            link = await connect_by_any(
                runner.address, self._keys, handshake.RETIRE, {}, name=runner.name, limit_s=limit_s
            )
            link.writer.transport.abort()
        except (SandboxError, OSError, TimeoutError):
            return  # it has exited, or the next canary will get no answer

    async def quarantine(self, runner: FoundRunner) -> None:
        """See `Source`. This gateway never uses the runner again."""
        self._quarantined.add(runner.name)

    async def lacked_memory(self, runner: FoundRunner) -> bool:
        """See `Source`. DNS does not tell."""
        return False

    async def close(self) -> None:
        """See `Source`. Does nothing, because the Deployment owns the runners."""
