"""Work for a request that ends when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from nouscoder.http_server.body import BodyFault

Answer = TypeVar("Answer")


async def while_connected(receive: Receive, work: Awaitable[Answer]) -> Answer:
    """Await `work`. A client that disconnects cancels it, which frees what it holds at once. Raises BodyFault then.

    `receive` is ASGI's, of a request whose body has been read.
    """
    me = asyncio.current_task()
    assert me is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        await _disconnected(receive)
        gone = True
        me.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not gone:
            raise
        me.uncancel()
        raise BodyFault(499, "the client disconnected") from None
    finally:
        watching.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
