"""A recorded run in a Prometheus of its own: every sample that a Prometheus took of one release, as OpenMetrics text.

The samples are in recorded_run/; recording.json says of what they are. Prometheus answers queries about the past, so a
changed expression is evaluated over the same samples by Prometheus itself.
"""

from __future__ import annotations

import json
import lzma
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

_FOLDER = Path(__file__).parent / "recorded_run"
_START_LIMIT_S = 60.0
_STOP_LIMIT_S = 30.0
_IMPORT_LIMIT_S = 120.0


def recorded_until_s() -> float:
    """The time of the last sample, in Unix seconds."""
    return float(json.loads((_FOLDER / "recording.json").read_text("utf8"))["end_s"])


@contextmanager
def recorded_prometheus() -> Iterator[str]:
    """The URL of a Prometheus that holds the samples. Skips the test where there is no Prometheus."""
    for program in ("prometheus", "promtool"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is missing: apt-get install prometheus")
    with TemporaryDirectory(prefix="nouscoder-replay-") as name:
        here = Path(name)
        (here / "samples.txt").write_bytes(lzma.decompress((_FOLDER / "samples.txt.xz").read_bytes()))
        command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "samples.txt", "data"]
        subprocess.run(command, cwd=here, capture_output=True, timeout=_IMPORT_LIMIT_S, check=True)
        (here / "prometheus.yml").write_text("global: {}\n", "utf8")
        with _serving(here) as url:
            yield url


@contextmanager
def _serving(folder: Path) -> Iterator[str]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    options = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "data",
        "storage.tsdb.retention.time": "100y",
        "web.listen-address": address,
    }
    command = ["prometheus", *(f"--{option}={value}" for option, value in options.items())]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _wait_until_ready(f"http://{address}", process)
            yield f"http://{address}"
        finally:
            process.terminate()
            try:
                process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "prometheus ended"
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(f"prometheus was not ready within {_START_LIMIT_S:.0f} s")
