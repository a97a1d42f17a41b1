"""What a release has, used as a stranger uses it: the wheel with each extra in an empty environment, and a registry.

Run by make test-release. The environments are made by uv from a package index, and no file of the checkout is used.
UV_TORCH_BACKEND=cpu takes torch's small build where an index has it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import helm_python as helm
import pytest
import yaml
from tests.oci_registry import pull, push, registry

pytestmark = [pytest.mark.release, pytest.mark.timeout(3600)]

PROJECT = Path(__file__).parents[2]
VERSION = "0.9.0"
SUBMISSION = {
    "language": "python",
    "code": "a, b = map(int, input().split())\nprint(a + b)",
    "tests": {"type": "stdin", "cases": [{"input": "1 2\n", "output": "3\n"}]},
}
UNREACHABLE = """
import nouscoder.client as grading
with grading.Client("http://127.0.0.1:9", grading.Patience(unreachable_s=0.0)) as client:
    try:
        client.grade(code="", tests={})
    except grading.GradingFailed as error:
        print(type(error).__name__)
"""
# What works with an extra: a program of Python, or a command. An extra that is only used with another one names both.
PYTHON = {
    "client": UNREACHABLE,
    "rpc": "import nouscoder.rpc.server, nouscoder.rpc.broker_client, zstandard",
    "verifier,math": "from nouscoder.verifier.judges import mathematics; assert mathematics.is_installed()",
    "tracing": "import nouscoder.verifier.observe.tracing, opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "rpc,cluster": "import nouscoder.doctor.cluster.install, nouscoder.doctor.cluster.judge, kubernetes",
    "verifier,modal": "import nouscoder.verifier.sandbox.modal.backend, modal",
    "hub": "from nouscoder.data.importers import rows; assert rows.loader_of_hubs()",
    "broker": "import nouscoder.broker.process, nouscoder.broker.servicer",
    "broker,embedded-redis": "from nouscoder.broker.redis_server import find_redis_binary; print(find_redis_binary())",
    "cli,tensorboard": "import tensorboard",
    "cli,wandb": "import wandb",
    "cli,mlflow": "import mlflow",
}
COMMANDS = {
    "cli": ["recipes"],
    "verifier": ["grade", "submission.jsonl", "--out", "verdicts.jsonl"],
    "data": ["data", "import", "nouscoder", "problems.jsonl", "--out", "problems.parquet"],
}
WITH_TORCH = {"generation", "learner", "gguf", "demo", "bench"}  # test_the_demo_runs_from_the_wheel installs all


@dataclass(frozen=True)
class Files:
    """The files of a release."""

    folder: Path

    @property
    def wheel(self) -> Path:
        return self.folder / f"nouscoder-{VERSION}-py3-none-any.whl"

    @property
    def source(self) -> Path:
        return self.folder / f"nouscoder-{VERSION}.tar.gz"

    @property
    def chart(self) -> Path:
        return self.folder / f"nouscoder-{VERSION}.tgz"


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """As `make release` makes them, without images."""
    spec = importlib.util.spec_from_file_location("release", PROJECT / "deploy" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    release = importlib.util.module_from_spec(spec)
    sys.modules["release"] = release
    spec.loader.exec_module(release)
    folder = tmp_path_factory.mktemp("release") / VERSION
    release.build(VERSION, folder, [])
    return Files(folder)


def run(*words: object, cwd: Path, limit_s: float = 600) -> str:
    """The output of a command that sees no checkout and no environment of Python but its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=kept, capture_output=True, text=True, timeout=limit_s, check=False
    )
    assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def uv() -> str:
    """The program that installs."""
    found = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found, "uv is not installed: pip install uv"
    return found


def installed(what: object, folder: Path) -> tuple[Path, list[str]]:
    """The `bin` of a new environment with this wheel, and the names of its packages."""
    begin = time.monotonic()
    run(uv(), "venv", "-q", "--python", sys.executable, folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    run(uv(), "pip", "install", "-q", "--python", python, what, cwd=folder, limit_s=3000)
    listed = run(uv(), "pip", "list", "-q", "--format", "json", "--python", python, cwd=folder)
    packages = [package["name"] for package in json.loads(listed)]
    num_bytes = sum(path.stat().st_size for path in (folder / "venv").rglob("*") if path.is_file())
    took_s = time.monotonic() - begin
    print(f"\n{Path(str(what)).name}: {len(packages)} packages, {num_bytes / 1e6:.0f} MB, installed in {took_s:.1f} s")
    return python.parent, packages


def test_every_extra_is_tried() -> None:
    """dev is not for users."""
    extras = set(tomllib.loads((PROJECT / "pyproject.toml").read_text("utf8"))["project"]["optional-dependencies"])
    tried = {name for names in (*PYTHON, *COMMANDS) for name in names.split(",")}
    assert tried | WITH_TORCH == extras - {"dev"}


def test_the_source_distribution_makes_the_same_wheel(files: Files, tmp_path: Path) -> None:
    """Without a repository, it has the version that it was made with."""
    run("tar", "-xf", files.source, cwd=tmp_path)
    (source,) = tmp_path.glob("nouscoder-*")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "made", cwd=source)
    assert contents(tmp_path / "made" / files.wheel.name) == contents(files.wheel)
    forbidden = re.compile(r"(^|/)(\.venv|dist|runs|\.git|__pycache__)/")
    assert [path for path in (*contents(files.wheel), *source.rglob("*")) if forbidden.search(str(path))] == []


def test_the_grader_and_the_client_work_alone(files: Files, tmp_path: Path) -> None:
    """Each in an environment of its own: the smallest use, the packages and the size."""
    for name, limit in (("client", 8), ("grader", 45)):
        folder = tmp_path / name
        folder.mkdir()
        wheel = files.folder / f"nouscoder_{name}-{VERSION}-py3-none-any.whl"
        binaries, packages = installed(wheel, folder)
        assert len(packages) <= limit, packages
        if name == "client":
            assert run(binaries / "python", "-I", "-c", UNREACHABLE, cwd=folder) == "Unreachable\n"
            continue
        (folder / "submission.jsonl").write_text(json.dumps({"id": "a", **SUBMISSION}) + "\n")
        assert run(binaries / "nouscoder", "--version", cwd=folder) == f"nouscoder {VERSION}\n"
        run(binaries / "nouscoder", "grade", "submission.jsonl", "--out", "verdicts.jsonl", cwd=folder)
        assert json.loads((folder / "verdicts.jsonl").read_text())["verdict"] == "accepted"


def contents(wheel: Path) -> dict[str, str]:
    """The digest of each file."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


@pytest.mark.parametrize("extras", [*PYTHON, *COMMANDS])
def test_the_wheel_works_with_each_extra(files: Files, tmp_path: Path, extras: str) -> None:
    """In an environment that has nothing else, in an empty folder."""
    binaries, packages = installed(f"{files.wheel}[{extras}]", tmp_path)
    (tmp_path / "submission.jsonl").write_text(json.dumps({"id": "a", **SUBMISSION}) + "\n")
    problem = {"id": "p", "problem": "Add.", "tests": SUBMISSION["tests"]}
    (tmp_path / "problems.jsonl").write_text(json.dumps(problem) + "\n")
    if extras == "client":
        assert len(packages) == 8, packages
        assert run(binaries / "python", "-I", "-c", PYTHON[extras], cwd=tmp_path) == "Unreachable\n"
        return
    assert run(binaries / "nouscoder", "--version", cwd=tmp_path) == f"nouscoder {VERSION}\n"
    if extras in PYTHON:
        run(binaries / "python", "-I", "-c", PYTHON[extras], cwd=tmp_path)
        return
    said = run(binaries / "nouscoder", *COMMANDS[extras], cwd=tmp_path)
    if extras == "verifier":
        assert json.loads((tmp_path / "verdicts.jsonl").read_text())["verdict"] == "accepted", said
    if extras == "data":
        assert (tmp_path / "problems.parquet").stat().st_size > 0


def test_the_demo_runs_from_the_wheel(files: Files, tmp_path: Path) -> None:
    """It learns, in a folder that has nothing but what it makes. Prints its last lines and its time."""
    binaries, packages = installed(f"{files.wheel}[{','.join(sorted(WITH_TORCH))}]", tmp_path)
    assert {"torch", "gguf", "psutil"} <= set(packages)
    (tmp_path / "empty").mkdir()
    begin = time.monotonic()
    said = run(binaries / "nouscoder", "demo", "--seed", "0", cwd=tmp_path / "empty", limit_s=3000)
    print(said[-1500:], f"\nthe demo took {time.monotonic() - begin:.0f} s")
    (summary,) = (tmp_path / "empty" / "runs").glob("*/summary.json")
    figures = json.loads(summary.read_text())
    assert figures["balanced"]
    assert figures["pass_at_1_after"] > figures["pass_at_1_before"]
    assert (summary.parent / "report.html").stat().st_size > 10_000


def test_the_chart_goes_through_a_registry(files: Files, tmp_path: Path) -> None:
    """Pushed and pulled it is the same, and it names the version and the published images."""
    (tmp_path / "pulled").mkdir()
    with registry(tmp_path) as host:
        helm.push(files.chart, f"oci://{host}/charts", plain_http=True)
        helm.pull(f"oci://{host}/charts/nouscoder", version=VERSION, destination=tmp_path / "pulled", plain_http=True)
    (pulled,) = (tmp_path / "pulled").glob("*.tgz")
    assert pulled.read_bytes() == files.chart.read_bytes()
    with tarfile.open(pulled) as archive:
        file = archive.extractfile("nouscoder/Chart.yaml")
        assert file is not None
        described = yaml.safe_load(file)
    assert (described["version"], described["appVersion"]) == (VERSION, VERSION)
    images = yaml.safe_load(described["annotations"]["artifacthub.io/images"])
    own = {image["image"] for image in images if "nouscoder" in image["image"]}
    assert own
    assert all(image.endswith(f":{VERSION}") and not image.startswith("localhost/") for image in own)


def test_an_image_goes_through_a_registry(tmp_path: Path) -> None:
    """The smallest image of `make release` in dist/, else of this machine's builder."""
    archives = sorted(PROJECT.glob("dist/*/nouscoder-*.tar"), key=lambda path: path.stat().st_size)
    if not archives:
        words = ["deploy/images/build", "--archives", str(tmp_path), "broker"]
        built = subprocess.run(words, cwd=PROJECT, capture_output=True, text=True, timeout=3000, check=False)
        if "install docker, buildah or podman" in built.stderr:
            pytest.skip("no builder of images is installed, and dist/ has no image: make release VERSION=0.1.0")
        assert built.returncode == 0, built.stderr[-3000:]
        archives = sorted(tmp_path.glob("nouscoder-*.tar"))
    with registry(tmp_path) as host:
        begin = time.monotonic()
        pushed = push(host, archives[0], "nouscoder/broker", VERSION)
        digest, configuration, num_bytes = pull(host, "nouscoder/broker", VERSION)
    print(f"\n{archives[0].name}: {num_bytes / 1e6:.0f} MB there and back in {time.monotonic() - begin:.1f} s")
    assert digest == pushed
    labels = configuration["config"]["Labels"]
    assert labels["org.opencontainers.image.title"].startswith("nouscoder-")
    assert re.match(r"\d+\.\d+\.\d+", labels["org.opencontainers.image.version"])
