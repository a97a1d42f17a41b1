"""What asyncio and threads do differently: many calls at once, waiting, locks, and reading the body of a request.

INVARIANT: `in_order` yields one result for each item, in their order; at most `at_once` are in progress. Items are read
only as results are taken, at most AHEAD for each that is in progress.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, TypeVar

AHEAD = 4
_PART_BYTES = 256 * 1024

Item = TypeVar("Item")
Result = TypeVar("Result")

async_sleep, sleep = asyncio.sleep, time.sleep
async_lock, lock = asyncio.Lock, threading.Lock


async def async_in_order(
    work: Callable[[Item], Awaitable[Result]], items: Iterable[Item], at_once: int
) -> AsyncIterator[Result]:
    """The results of `work` on each item, in tasks."""
    places = asyncio.Semaphore(at_once)

    async def bounded(item: Item) -> Result:
        async with places:
            return await work(item)

    waiting: deque[asyncio.Task[Result]] = deque()
    try:
        for item in items:
            waiting.append(asyncio.create_task(bounded(item)))
            if len(waiting) >= AHEAD * at_once:
                yield await waiting.popleft()
        while waiting:
            yield await waiting.popleft()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def in_order(work: Callable[[Item], Result], items: Iterable[Item], at_once: int) -> Iterator[Result]:
    """The results of `work` on each item, in threads."""
    pool = ThreadPoolExecutor(at_once, thread_name_prefix="grade_many")
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) >= AHEAD * at_once:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


async def async_parts(body: IO[bytes]) -> AsyncIterator[bytes]:
    """The bytes of a file, read in another thread."""
    while part := await asyncio.to_thread(body.read, _PART_BYTES):
        yield part


def parts(body: IO[bytes]) -> IO[bytes]:
    """The file itself, which httpx reads in parts."""
    return body
