"""Two users on one host: a run of one, and another who tries every path and every address of it.

The test needs root, which becomes the other user.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nouscoder.client import Client
from nouscoder.http_server.api_keys import new_api_key
from nouscoder.rpc.metrics_page import read_metrics

HERE = Path(__file__).with_name("two_users")
NOBODY = 65534
SERVICES = ("broker", "verifier", "generation", "learner")
NOT_FILES = ("/dev/", "/proc/", "/sys/")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user of this host")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that every user may enter, with a shared temporary folder. pytest's own are closed to others."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it in a process that compiles
    place = Path(tempfile.mkdtemp(prefix="two-users-", dir="/tmp"))
    place.chmod(0o755)
    for name, mode in (("tmp", 0o1777), ("cache", 0o755)):
        (place / name).mkdir()
        (place / name).chmod(mode)
    yield place
    shutil.rmtree(place)


def stranger(uid: int, paths: list[str], addresses: dict[str, str]) -> list[str]:
    """What this user could read, replace and call."""
    wanted = json.dumps({"uid": uid, "paths": paths, "addresses": addresses})
    command = [sys.executable, str(HERE / "stranger.py")]
    answer = subprocess.run(command, input=wanted, capture_output=True, text=True, timeout=120, check=True)
    found: list[str] = json.loads(answer.stdout)
    return found


def everything_in(place: Path) -> list[str]:
    return [os.path.join(folder, name) for folder, folders, files in os.walk(place) for name in (*folders, *files)]


def tcp_listeners(pids: list[int]) -> list[str]:
    """The local addresses of TCP sockets on which these processes listen."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            inodes.add(os.readlink(descriptor))
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in inodes]


def open_to_others(made: list[dict[str, Any]], allowed: tuple[Path, ...]) -> list[str]:
    """The paths that were made where other users can read or replace them, each with the process that made it."""
    closed = {one["path"] for one in made if one["event"] == "mkdir" and not one["mode"] & 0o077}
    found = []
    for one in made:
        path = Path(one["path"])
        if one["path"].startswith(NOT_FILES) or any(path.is_relative_to(place) for place in allowed):
            continue
        is_exclusive = one["event"] == "open" and one["mode"] & os.O_EXCL and one["mode"] & os.O_NOFOLLOW
        is_unnamed = one["event"] == "open" and path.is_dir()  # O_TMPFILE: it never has a name
        if (
            is_exclusive
            or is_unnamed
            or any(str(place) in closed or is_closed(place) for place in (path, *path.parents))
        ):
            continue
        found.append(f"{one['event']} {path} by {one['by']}")
    return found


def environment_of(host: Path, tmp_path: Path) -> dict[str, str]:
    """That of a process that uses the shared folders of `host` and notes in tmp_path/made what it makes."""
    return {
        "TMPDIR": str(host / "tmp"),
        "XDG_CACHE_HOME": str(host / "cache"),
        "MADE_PATHS": str(tmp_path / "made"),
        "PYTHONDONTWRITEBYTECODE": "1",  # bytecode lies beside the sources
        "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}",
    }


def command_of(run: Any, name: str) -> None:
    command = [sys.executable, "-m", "nouscoder", name, "--broker", run.broker()]
    subprocess.run(command, capture_output=True, timeout=60, check=True)


def is_closed(place: Path) -> bool:
    try:
        return stat.S_ISDIR(mode := place.lstat().st_mode) and not mode & 0o077
    except OSError:
        return False


def read_made(file: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [dict(zip(("event", "path", "mode", "by"), line, strict=True)) for line in lines]


@pytest.mark.heavy
def test_another_user_reads_replaces_and_calls_nothing_of_a_run(
    host: Path, loop_run: Callable[..., Any], tmp_path: Path
) -> None:
    run = loop_run(f'run.root="{host}"', "run.total_batches=40")
    run.folder = host / "run"
    run.environment = environment_of(host, tmp_path)
    run.start()
    run.until(lambda: bool(run.steps()), "the first step")
    config = tomllib.loads((run.folder / "config.toml").read_text())
    addresses = {name: config[name]["grpc"] for name in SERVICES}
    command_of(run, "pause")  # so that the run does not end before the other user has tried everything

    paths = [str(run.folder), *everything_in(run.folder), *everything_in(host / "tmp")]
    assert {str(run.folder / "sockets" / f"{name}.sock") for name in SERVICES} <= set(paths)
    assert stranger(os.getuid(), [], addresses) == [f"called {name}" for name in SERVICES], "the run itself can call"
    assert stranger(NOBODY, paths, addresses) == []
    assert tcp_listeners([*run.pids()]) == [], "every service listens on a socket of the run's folder"
    assert run.status()["balanced"] is True, "commands of the same user need no configuration"

    made = read_made(tmp_path / "made")
    assert {Path(one["path"]).name for one in made} >= {"broker.metrics", "config.toml.part", "init.so", "broker.log"}
    assert open_to_others(made, (run.folder, host / "cache", tmp_path)) == []
    others = [
        path for path in everything_in(host / "cache") if os.lstat(path).st_mode & 0o022 and not os.path.islink(path)
    ]
    assert others == [], "caches may be read, and changed by their user alone"
    command_of(run, "resume")
    assert run.wait() == 0, run.text()[-3000:]
    assert all(is_closed(place) for place in (host / "tmp").iterdir()), "what is left in /tmp is closed"


@pytest.mark.heavy
def test_another_user_reads_and_replaces_nothing_of_a_grading_service(host: Path, tmp_path: Path) -> None:
    """Started by hand, with two processes, a token, an audit log, and sockets for gRPC and metrics."""
    token, line = new_api_key("ann")
    (tmp_path / "tokens").write_text(line)
    sockets = host / "sockets"
    sockets.mkdir(mode=0o700)
    grpc, metrics = (f"unix:{sockets / name}" for name in ("grpc", "metrics"))
    command = [sys.executable, "-m", "nouscoder", "serve", "verifier", "--http", "127.0.0.1:0"]
    command += ["--grpc", grpc, "--metrics", metrics, "--set", f'verifier.tokens_file="{tmp_path / "tokens"}"']
    command += ["--set", "verifier.processes=2", "--set", "verifier.sandbox.slots=2"]
    command += ["--set", f'verifier.audit_log="{host / "audit"}"', "--set", "verifier.audit_source=true"]
    environment = {**os.environ, **environment_of(host, tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True) as service:
        try:
            assert service.stderr is not None
            said = next(json.loads(line) for line in service.stderr if '"http"' in line)
            with Client(f"http://{said['http']}", token=token) as client:
                tests = {"type": "stdin", "cases": [{"input": "1", "output": "SECRET-42"}]}
                verdict = client.grade(code="print('SECRET-42')", tests={"digest": client.put_tests(tests)})
                assert verdict["verdict"] == "accepted"
            assert "nouscoder_verifier_submissions_total" in read_metrics(metrics)
            assert stranger(os.getuid(), [], {"verifier": grpc}) == ["called verifier"]

            left = [path for path in everything_in(host) if not path.startswith(str(host / "cache"))]
            shared = {str(host / "tmp")}
            assert any(path.endswith("/lock") for path in left)
            assert stranger(NOBODY, [path for path in left if path not in shared], {"verifier": grpc}) == []
            made = read_made(tmp_path / "made")
            assert open_to_others(made, (host / "cache", tmp_path, host / "audit")) == []
        finally:
            service.terminate()
            assert service.wait(60) == 0
