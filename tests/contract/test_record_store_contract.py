"""The contract of every record store: Redis, a shared folder, an object store (two local ones of its library)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from nouscoder.broker.redis_server import start_redis
from nouscoder.store.folder_records import FolderRecords
from nouscoder.store.object_records import ObjectRecords
from nouscoder.store.record_store import ByteRange, RecordStore, RecordStoreError
from nouscoder.store.redis_records import RedisRecords

RECORD = bytes(range(256)) * 4


@pytest.fixture(params=["redis", "folder", "object-file", "object-memory"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RecordStore]:
    if request.param == "redis":
        server = start_redis(tmp_path)
        client = Redis.from_url(server.url)
        yield RedisRecords(client, "nouscoder:{run}:")
        await client.aclose()
        server.close()
    elif request.param == "folder":
        yield FolderRecords(tmp_path / "records")
    elif request.param == "object-file":
        yield ObjectRecords(tmp_path.as_uri())
    else:
        yield ObjectRecords("memory:///")


async def test_ranges_are_returned_in_order(store: RecordStore) -> None:
    await store.put({"g000001-0.7-0.1": RECORD, "g000001-1.8-0.2": RECORD[::-1]})
    whole = [ByteRange("g000001-1.8-0.2", 0, 1024), ByteRange("g000001-0.7-0.1", 0, 1024)]
    assert await store.read(whole) == [RECORD[::-1], RECORD]
    assert await store.read([ByteRange("g000001-0.7-0.1", 100, 50)]) == [RECORD[100:150]]
    assert await store.read([ByteRange("g000001-0.7-0.1", 1000, 50)]) == [RECORD[1000:]], "shorter where it ends"
    assert await store.read([]) == []


async def test_a_missing_record_is_empty(store: RecordStore) -> None:
    await store.put({"g000001-0.7-0.1": RECORD})
    wanted = [ByteRange("g000009-0.1-0.1", 0, 10), ByteRange("g000001-0.7-0.1", 0, 3)]
    assert await store.read(wanted) == [b"", RECORD[:3]]


async def test_a_record_can_be_written_again_and_deleted(store: RecordStore) -> None:
    names = [f"g000001-{member}.7-0.1" for member in range(3)]
    await store.put(dict.fromkeys(names, RECORD))
    await store.put(dict.fromkeys(names, RECORD))
    await store.put({})
    await store.delete(["g000009-0.1-0.1", *names[:2]])
    assert await store.read([ByteRange(name, 0, 2) for name in names]) == [b"", b"", RECORD[:2]]
    await store.delete(names[:2])
    await store.delete([])


async def test_large_records_are_read_completely(store: RecordStore) -> None:
    record = RECORD * 2000
    await store.put({"g000001-0.7-0.1": record})
    assert b"".join(await store.read([ByteRange("g000001-0.7-0.1", 0, len(record))])) == record


async def test_an_unreachable_store_raises_record_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    client = Redis.from_url(f"unix://{tmp_path}/no.sock")
    for store in (RedisRecords(client, "p:"), FolderRecords(tmp_path / "file")):
        with pytest.raises(RecordStoreError, match="g000001-0"):
            await store.put({"g000001-0.7-0.1": RECORD})
    await client.aclose()
    with pytest.raises(RecordStoreError, match="names no object store"):
        ObjectRecords("nonsense://bucket")
