"""A recording: every sample that a Prometheus took of one release, as OpenMetrics text, and what the samples are of.

`record` reads the samples from a Prometheus. `replay` gives them to a Prometheus of its own, which then answers queries
about the past. So a changed expression is evaluated again over the same samples by Prometheus itself.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deploy.dashboards.live import CannotCheck, ask
from deploy.pictures.processes import free_port, stop

ABOUT, SAMPLES = "recording.json", "samples.txt.xz"
_KEPT = "(nouscoder|process)_.+"  # the metrics of the services; other exporters are not on the dashboards
_START_LIMIT_S = 60.0
_IMPORT_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class About:
    """What was recorded: one sentence, the time in Unix seconds, the labels of the release, seconds between scrapes."""

    sentence: str
    start_s: float
    end_s: float
    scrape_s: float
    namespace: str
    release: str


def record(url: str, about: About, folder: Path) -> int:
    """Write all samples of the release between start_s and end_s, and narrow both to the first and the last sample.

    Returns the number of samples. Raises CannotCheck.
    """
    if not about.start_s < about.end_s:
        raise CannotCheck("a recording must be longer than 0 s")
    scope = f'namespace="{about.namespace}",app_kubernetes_io_instance="{about.release}",__name__=~"{_KEPT}"'
    seconds = round(about.end_s - about.start_s)
    data = ask(url, "query", {"query": f"{{{scope}}}[{seconds}s]", "time": f"{about.end_s:.3f}"})
    if isinstance(data, str):
        raise CannotCheck(f"{url}: {data}")
    series = sorted(data["result"], key=lambda one: (one["metric"]["__name__"], sorted(one["metric"].items())))
    series = [one for one in series if not one["metric"]["__name__"].endswith("_created")]
    if not series:
        raise CannotCheck(f"{url} has no sample of the release {about.release} in the namespace {about.namespace}")
    lines = [line for one in series for line in _lines(one)]
    times = [at_s for one in series for at_s, _ in one["values"]]
    about = replace(about, start_s=min(times), end_s=max(times))
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join([*lines, "# EOF", ""])
    (folder / SAMPLES).write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    (folder / ABOUT).write_text(json.dumps(asdict(about), indent=1) + "\n", "utf8")
    return len(lines)


def _lines(series: dict[str, Any]) -> Iterator[str]:
    labels = ",".join(
        f'{name}="{_escaped(value)}"' for name, value in sorted(series["metric"].items()) if name != "__name__"
    )
    for at_s, value in series["values"]:
        yield f"{series['metric']['__name__']}{{{labels}}} {value} {at_s}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def read_about(folder: Path) -> About:
    """What the recording in a folder is of. Raises CannotCheck."""
    try:
        return About(**json.loads((folder / ABOUT).read_text("utf8")))
    except (OSError, ValueError, TypeError) as error:
        raise CannotCheck(f"{folder / ABOUT} cannot be read: {error}") from None


def digest(folder: Path) -> str:
    """Names the samples and what is said about them. Raises CannotCheck."""
    try:
        parts = [(folder / name).read_bytes() for name in (ABOUT, SAMPLES)]
    except OSError as error:
        raise CannotCheck(f"the recording cannot be read: {error}") from None
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


@contextmanager
def replay(folder: Path) -> Iterator[str]:
    """The URL of a Prometheus that holds the samples of a recording. Raises CannotCheck."""
    with TemporaryDirectory(prefix="nouscoder-replay-") as name:
        here = Path(name)
        try:
            (here / "samples.txt").write_bytes(lzma.decompress((folder / SAMPLES).read_bytes()))
        except (OSError, lzma.LZMAError) as error:
            raise CannotCheck(f"the recording cannot be read: {error}") from None
        _run(["promtool", "tsdb", "create-blocks-from", "openmetrics", "samples.txt", "data"], here)
        (here / "prometheus.yml").write_text("global: {}\n", "utf8")
        with serve_prometheus(here) as url:
            yield url


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_IMPORT_LIMIT_S, check=False)
    except FileNotFoundError:
        raise CannotCheck(f"{command[0]} is missing: apt-get install prometheus") from None
    except subprocess.TimeoutExpired:
        raise CannotCheck(f"{command[0]} took longer than {_IMPORT_LIMIT_S:.0f} s") from None
    if done.returncode:
        raise CannotCheck(f"{command[0]} refuses the recording: {(done.stderr or done.stdout).strip()[-300:]}")


@contextmanager
def serve_prometheus(folder: Path) -> Iterator[str]:
    """The URL of a Prometheus with the configuration folder/prometheus.yml and the data in folder/data."""
    if shutil.which("prometheus") is None:
        raise CannotCheck("prometheus is missing: apt-get install prometheus")
    address = f"127.0.0.1:{free_port()}"
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
            _wait_until_ready(f"http://{address}", process, folder / "prometheus.log")
            yield f"http://{address}"
        finally:
            stop(process)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise CannotCheck(f"prometheus ended with status {process.returncode}: {log.read_text('utf8')[-300:]}")
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise CannotCheck(f"prometheus was not ready within {_START_LIMIT_S:.0f} s")
