"""The chart's Redis starts on a file that a power cut has damaged: a real Redis with the chart's script."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis
from tests.redis_process import (
    a_base_of_zeros,
    a_manifest_of_zeros,
    free_port,
    half_a_command,
    until,
    with_folders,
    zeros_at_the_end,
)

if TYPE_CHECKING:
    from tests.chart.conftest import ChartRig


@contextmanager
def started(chart: ChartRig, folder: Path) -> Iterator[redis.Redis]:
    """Redis by start.sh on `folder`, killed at the end."""
    data, port = chart.one("ConfigMap", "nouscoder-redis")["data"], free_port()

    def local(text: str) -> str:
        return re.sub(r"/(?:etc/redis|data|tmp|sys/fs/cgroup)\b", rf"{folder}\g<0>", text)

    for path in ("etc/redis", "data", "tmp", "sys/fs/cgroup"):
        (folder / path).mkdir(parents=True, exist_ok=True)
    (folder / "etc/redis/redis.conf").write_text(local(data["redis.conf"]) + f"port {port}\nbind 127.0.0.1\n")
    (folder / "etc/redis/password").write_text("secret")
    environment = {**os.environ, "PATH": f"{Path(with_folders() or '').parent}:{os.environ['PATH']}"}
    (folder / "start.sh").write_text(local(data["start.sh"]))
    ready = local(data["ready.sh"]).replace("redis-cli", f"redis-cli -p {port}")
    as_kubelet = f"sh {folder}/start.sh || exec sh {folder}/start.sh"  # a failed start is followed by another
    with subprocess.Popen(["sh", "-c", as_kubelet], env=environment, start_new_session=True) as process:
        try:
            client = redis.Redis(host="127.0.0.1", port=port, password="secret")

            def answers() -> bool:
                assert process.poll() is None, "Redis has ended"
                return subprocess.run(["sh", "-c", ready], env=environment, check=False).returncode == 0

            until(answers, "Redis answers")
            yield client
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


@pytest.mark.parametrize(
    ("damage", "kept"),
    [(zeros_at_the_end, 100), (half_a_command, 99), (a_base_of_zeros, 0), (a_manifest_of_zeros, 0)],
)
def test_redis_starts_with_what_is_whole_and_keeps_the_damaged_file(
    chart: ChartRig, tmp_path: Path, damage: Callable[[Path], None], kept: int
) -> None:
    if with_folders() is None or shutil.which("redis-check-aof") is None:
        pytest.skip("Redis 7 and redis-check-aof are missing: apt-get install redis-server redis-tools")
    with started(chart, tmp_path) as client:
        for number in range(100):
            client.set(f"nouscoder:{number}", "x")
        until(lambda: client.info("persistence")["aof_buffer_length"] == 0, "all is written")
    assert not (tmp_path / "data/damaged").exists()
    damage(tmp_path / "data/appendonlydir")
    for _ in range(2):
        with started(chart, tmp_path) as client:
            assert client.dbsize() == kept
            # Redis itself cuts off half a command.
            assert (tmp_path / "data/damaged").is_dir() == (damage is not half_a_command)
    with started(chart, tmp_path) as client:
        client.set("nouscoder:more", "y")
        assert client.dbsize() == kept + 1
