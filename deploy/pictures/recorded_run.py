"""Record the demo: train it with a Prometheus that scrapes its services, beside two clients of its APIs.

Prometheus is configured by deploy/compose/prometheus.yaml, with addresses of this machine. The demo itself uses no
API, so one client grades programs in C++ and Python, and one asks the API in OpenAI's form for completions.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deploy.dashboards.live import CannotCheck
from deploy.pictures.processes import free_port, stop
from deploy.pictures.recording import About, record, serve_prometheus

ROOT = Path(__file__).parents[2]
SCRAPE_S = 5
_NAMESPACE, _RELEASE = "compose", "nouscoder"  # as deploy/compose/prometheus.yaml labels the samples
_SERVICES = ("verifier", "broker", "generation", "learner")
_WARM_START_LIMIT_S, _LONGEST_S = 900.0, 3600.0
_SENTENCE = (
    "`nouscoder demo` on 2 cores without a GPU, sandboxes in namespaces of this machine, beside a client that grades "
    "programs and a client of the API in OpenAI's form"
)
_CPP = "#include <iostream>\nint main() {{ long n; std::cin >> n; std::cout << n * {factor} << std::endl; }}\n"
_PYTHON = "print(int(input()) * {factor})\n"


def record_demo(folder: Path, limit_s: float) -> int:
    """Train the demo and record it until its end, at most limit_s after its warm start.

    Returns the number of samples. Raises CannotCheck.
    """
    if not 0 < limit_s <= _LONGEST_S:
        raise CannotCheck(f"a recording takes more than 0 and at most {_LONGEST_S / 60:.0f} minutes")
    http = {name: free_port() for name in ("verifier", "generation.openai")}
    with TemporaryDirectory(prefix="nouscoder-recorded-") as name:
        here = Path(name)
        values = {f"{section}.http": f"127.0.0.1:{port}" for section, port in http.items()}
        values |= {"run.root": str(here / "runs")}
        options = [word for name, value in values.items() for word in ("--set", f"{name}={json.dumps(value)}")]
        command = [sys.executable, "-m", "nouscoder", "demo", "--name", "demo", *options]
        process = subprocess.Popen(command)
        try:
            addresses = _metrics_addresses(here / "runs" / "demo" / "config.toml", process)
            (here / "prometheus.yml").write_text(prometheus_config(addresses), "utf8")
            with serve_prometheus(here) as url:
                start_s = time.time()
                _use(process, http, limit_s)
                about = About(_SENTENCE, start_s, time.time(), SCRAPE_S, _NAMESPACE, _RELEASE)
                return record(url, about, folder)
        finally:
            stop(process)


def prometheus_config(addresses: Mapping[str, str]) -> str:
    """The configuration of deploy/compose.yaml for services at these addresses of this machine, without its rules."""
    text = (ROOT / "deploy" / "compose" / "prometheus.yaml").read_text("utf8")
    text = re.sub(r'"(\w+):9090"', lambda match: f'"{addresses[match[1]]}"', text)
    return re.sub(r"rule_files: .*\n", "", text).replace("15s", f"{SCRAPE_S}s")


def _metrics_addresses(config_file: Path, process: subprocess.Popen[bytes]) -> dict[str, str]:
    """The addresses that the run gives its services after the warm start. Raises CannotCheck."""
    deadline = time.monotonic() + _WARM_START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise CannotCheck(f"the demo ended with status {process.returncode} before its services started")
        if config_file.is_file():
            config = tomllib.loads(config_file.read_text("utf8"))
            addresses = {name: str(config[name]["metrics"]) for name in _SERVICES}
            if not any(address.endswith(":0") for address in addresses.values()):
                return addresses
        time.sleep(0.5)
    raise CannotCheck(f"the demo's services did not start within {_WARM_START_LIMIT_S:.0f} s")


def _use(process: subprocess.Popen[bytes], http: Mapping[str, int], limit_s: float) -> None:
    """Be a client of the services until the run ends, at most for limit_s. Raises CannotCheck if the run fails."""
    with _clients(http):
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return
    if code:
        raise CannotCheck(f"the demo ended with status {code}")


@contextmanager
def _clients(http: Mapping[str, int]) -> Iterator[None]:
    ended = threading.Event()
    threads = [
        threading.Thread(target=_grade, args=(f"http://127.0.0.1:{http['verifier']}/v1/grade", ended)),
        threading.Thread(
            target=_complete, args=(f"http://127.0.0.1:{http['generation.openai']}/v1/completions", ended)
        ),
    ]
    for one in threads:
        one.start()
    try:
        yield
    finally:
        ended.set()
        for one in threads:
            one.join()


def _grade(url: str, ended: threading.Event) -> None:
    """Every program in C++ twice, so that the second is found compiled; every fourth answer is wrong."""
    turn = 0
    while not ended.wait(2):
        cpp, factor = turn % 2 == 0, turn // 4
        code = (_CPP if cpp else _PYTHON).format(factor=factor)
        number = turn % 7 + 1
        right = number * factor if turn % 4 else -1
        tests = {"type": "stdin", "cases": [{"input": f"{number}\n", "output": f"{right}\n"}]}
        _post(url, {"language": "cpp" if cpp else "python", "code": code, "tests": tests})
        turn += 1


def _complete(url: str, ended: threading.Event) -> None:
    while not ended.wait(4):
        _post(url, {"model": "demo", "prompt": "Write a program.\n", "max_tokens": 32})


def _post(url: str, body: dict[str, Any]) -> None:
    """A request whose answer is read. The service may not be there yet, or no more, or refuse."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
    except (urllib.error.URLError, OSError):
        return
