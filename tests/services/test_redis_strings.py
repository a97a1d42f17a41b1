"""Reads of many strings at once from Redis, over connections of redis-py's pool, and what follows when they fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

from nouscoder.broker.redis_server import start_redis
from nouscoder.store.redis_reads import read_parts

Run = Callable[[Coroutine[Any, Any, None]], None]
AWKWARD = b"\r\n$5\r\n-ERR\r\n" + bytes(range(256))
LARGE = AWKWARD * 8000
# What the imitated Redis does with a command on its n-th connection: it sends these bytes, or (None) hangs up.
Reaction = Callable[[int, list[bytes]], bytes | None]


def one_connection(url: str, **options: Any) -> Redis:
    """A client with a single connection, so that every command and every read uses the same one."""
    retry = Retry(ConstantBackoff(0.01), 1)
    return Redis.from_pool(BlockingConnectionPool.from_url(url, max_connections=1, timeout=60, retry=retry, **options))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_reads_and_commands_take_turns_on_one_connection(run: Run, tmp_path: Path) -> None:
    server = start_redis(tmp_path)

    async def take_turns() -> None:
        client = one_connection(server.url)
        for _ in range(3):
            await client.mset({"awkward": AWKWARD, "large": LARGE})
            wanted = [(b"large", 0, len(LARGE)), (b"none", 0, 9), (b"awkward", 2, 7), (b"awkward", 260, 100)]
            assert await read_parts(client, wanted) == [LARGE, b"", AWKWARD[2:9], AWKWARD[260:]]
            assert await client.get("awkward") == AWKWARD
        await client.rpush("list", "a")
        with pytest.raises(exceptions.ResponseError, match="WRONGTYPE"):
            await read_parts(client, [(b"awkward", 0, 3), (b"list", 0, 3), (b"awkward", 0, 3)])
        assert await client.get("awkward") == AWKWARD
        assert await read_parts(client, [(b"awkward", 0, 3)]) == [AWKWARD[:3]]
        await client.aclose()

    run(take_turns())
    server.close()


async def test_a_connection_that_redis_closed_is_replaced(tmp_path: Path) -> None:
    server = start_redis(tmp_path)
    client, other = one_connection(server.url), Redis.from_url(server.url)
    await client.set("key", "value")
    await other.client_kill_filter(_type="normal", skipme=True)
    assert await read_parts(client, [(b"key", 0, 5)]) == [b"value"]
    await client.aclose()
    await other.aclose()
    server.close()


@asynccontextmanager
async def imitated(reaction: Reaction, *, piece: int = 1 << 20) -> AsyncIterator[Redis]:
    """A client of an imitated Redis that sends its bytes in pieces of that size."""
    connections = iter(range(100))
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = next(connections)
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        while (line := await reader.readline()) and (words := [await word_of(reader) for _ in range(int(line[1:]))]):
            data = reaction(number, words)
            if data is None:
                break
            for start in range(0, len(data), piece):
                writer.write(data[start : start + piece])
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = one_connection(f"redis://127.0.0.1:{port}", protocol=2, driver_info=None, socket_timeout=60)
    try:
        yield client
    finally:
        await client.aclose()
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def word_of(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readline())[1:])
    return (await reader.readexactly(size + 2))[:-2]


def key_as_string(words: list[bytes]) -> bytes:
    """GETRANGE answered with the name of its key."""
    return b"$%d\r\n%b\r\n" % (len(words[1]), words[1])


async def test_an_answer_may_come_one_byte_at_a_time() -> None:
    async with imitated(lambda _, words: key_as_string(words), piece=1) as client:
        assert await read_parts(client, [(b"first", 0, 9), (b"second", 0, 9)]) == [b"first", b"second"]


async def test_a_connection_lost_in_the_middle_is_tried_once_more() -> None:
    def hang_up_first(connection: int, words: list[bytes]) -> bytes | None:
        return None if connection == 0 and words[1] == b"second" else key_as_string(words)

    async with imitated(hang_up_first) as client:
        assert await read_parts(client, [(b"first", 0, 9), (b"second", 0, 9)]) == [b"first", b"second"]
    async with imitated(lambda _, words: None) as client:
        with pytest.raises(exceptions.ConnectionError):
            await read_parts(client, [(b"first", 0, 9)])


async def test_nobody_gets_the_answer_to_a_read_that_was_cancelled() -> None:
    asked = asyncio.Event()

    def answer_half(connection: int, words: list[bytes]) -> bytes | None:
        if connection:
            return key_as_string(words)
        asked.set()
        return b"$5\r\nfi"

    async with imitated(answer_half) as client:
        reading = asyncio.create_task(read_parts(client, [(b"first", 0, 9)]))
        async with asyncio.timeout(60):
            await asked.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await read_parts(client, [(b"second", 0, 9)]) == [b"second"]


@pytest.mark.parametrize("answer", [b"-LOADING soon\r\n", b":5\r\n", b"x" * 4096], ids=["error", "number", "noise"])
async def test_an_answer_that_is_no_string_is_an_error(answer: bytes) -> None:
    async with imitated(lambda connection, words: key_as_string(words) if connection else answer) as client:
        with pytest.raises(exceptions.RedisError):
            await read_parts(client, [(b"first", 0, 9)])
        assert await read_parts(client, [(b"second", 0, 9)]) == [b"second"]
