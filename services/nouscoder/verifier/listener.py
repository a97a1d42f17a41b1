"""Serving an ASGI application inside the service's own event loop, without signal handlers of its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack

import uvicorn
from fastapi import FastAPI

from nouscoder.rpc.server import AddressError, split_address

STOP_PATIENCE_S = 5.0


class _Server(uvicorn.Server):
    """rpc.server.stop_event governs the process, so uvicorn must leave the signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def start_http(app: FastAPI, address: str, stack: AsyncExitStack) -> str:
    """Listen on `address` (port 0 takes a free one); `stack` undoes it. Returns the address in use.

    Raises AddressError in one sentence when the address cannot be had.
    """
    host, port = split_address(address)
    try:
        listening = socket.create_server((host, port), backlog=1024, family=_family(host))
    except OSError as error:
        raise AddressError(f"cannot listen on {address} for HTTP: {error.strerror or error}") from error
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=int(STOP_PATIENCE_S),
    )
    server = _Server(config)
    task = asyncio.ensure_future(server.serve(sockets=[listening]))

    async def stop() -> None:
        server.should_exit = True
        await asyncio.wait({task}, timeout=2 * STOP_PATIENCE_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        listening.close()

    stack.push_async_callback(stop)
    return f"{host}:{listening.getsockname()[1]}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
