"""Serving an ASGI application inside the service's own event loop, without signal handlers of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
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


async def start_http(app: FastAPI, address: str, stack: AsyncExitStack, tls: ssl.SSLContext | None = None) -> str:
    """Listen on `address` (port 0 takes a free one); `stack` undoes it. Returns the address in use.

    Raises AddressError in one sentence when the address cannot be had.
    """
    listening = _listen(address)
    host, _ = split_address(address)
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        ssl_context_factory=None if tls is None else lambda *_: tls,
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


def _listen(address: str) -> socket.socket:
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's algorithm off (40 ms an answer) only where it reads TCP.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise AddressError(f"cannot listen on {address} for HTTP: {_reason(error)}") from error
    return listening


def _reason(error: OSError) -> str:
    """A name that cannot be resolved has no errno of the system."""
    return str(error) if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
