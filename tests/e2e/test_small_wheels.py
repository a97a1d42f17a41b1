"""The packages nouscoder-grader and nouscoder-client, unpacked from their wheels, in place of the project's source.

make test-release installs them in empty environments. Here the environment has every library, and no source but theirs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from tests.redis_process import until

PROJECT = Path(__file__).parents[2]
SUBMISSION = {
    "id": "a",
    "code": "print(sum(map(int, input().split())))",
    "tests": {"type": "stdin", "cases": [{"input": "1 2\n", "output": "3\n"}]},
}
# The harness runs as programs of a sandbox, and a few of its files end the process that imports them.
IMPORT_ALL = """
import pkgutil, importlib, sys
import nouscoder
assert nouscoder.__file__.startswith(sys.argv[1])
for found in pkgutil.walk_packages(nouscoder.__path__, "nouscoder.", onerror=lambda name: sys.exit(f"without {name}")):
    if not found.name.startswith(("nouscoder.verifier.harness.", "nouscoder.__main__")):
        importlib.import_module(found.name)
"""


def unpacked(name: str, folder: Path) -> tuple[Path, Path]:
    """The wheel of a package of packages/, and the folder with its files."""
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    subprocess.run(words, cwd=PROJECT / "packages" / name, check=True, capture_output=True, timeout=120)
    (wheel,) = (folder / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "files")
    return wheel, folder / "files"


@pytest.fixture(scope="module")
def grader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked("nouscoder-grader", tmp_path_factory.mktemp("grader"))[1]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return unpacked("nouscoder-client", tmp_path_factory.mktemp("client"))


def python(files: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with these files in place of the source."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(files), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("module", ["learner", "generation", "broker", "sft", "self_play", "reward_model", "run.loop"])
def test_the_grader_has_nothing_of_the_trainer(grader: Path, module: str) -> None:
    assert not [*grader.glob(f"nouscoder/{module.replace('.', '/')}*")]


def test_every_module_of_the_grader_finds_what_it_imports(grader: Path, tmp_path: Path) -> None:
    done = python(grader, "-c", IMPORT_ALL, str(grader), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_grader_grades_and_shows_no_command_that_it_lacks(grader: Path, tmp_path: Path) -> None:
    (tmp_path / "submissions.jsonl").write_text(json.dumps(SUBMISSION) + "\n")
    done = python(grader, "-m", "nouscoder", "grade", "submissions.jsonl", "--out", "verdicts.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "verdicts.jsonl").read_text())["verdict"] == "accepted"
    shown = python(grader, "-m", "nouscoder", "--help", cwd=tmp_path).stdout
    assert re.findall(r"^│ ([a-z][a-z-]+) ", shown, re.MULTILINE) == [
        "serve",
        "grade",
        "prepare",
        "doctor",
        "tokens",
        "data",
    ]


def test_a_service_that_the_grader_lacks_is_one_sentence(grader: Path, tmp_path: Path) -> None:
    done = python(grader, "-m", "nouscoder", "serve", "broker", cwd=tmp_path)
    assert done.returncode == 78
    assert done.stderr.startswith(
        "nouscoder: nouscoder-grader has the grading service alone; the whole project has this"
    )
    assert done.stderr.count("\n") == 1


def test_the_client_is_below_100_kb_and_its_example_grades_at_the_graders_service(
    client: tuple[Path, Path], grader: Path, tmp_path: Path
) -> None:
    wheel, files = client
    assert wheel.stat().st_size < 100_000
    metadata = message_from_bytes(next(files.glob("*.dist-info/METADATA")).read_bytes())
    assert [line.partition(">")[0] for line in metadata.get_all("Requires-Dist", [])] == ["httpx"]
    (example,) = re.findall(
        r"```python\n(.*?)```", (PROJECT / "packages/nouscoder-client/README.md").read_text(), re.DOTALL
    )
    log = tmp_path / "log"
    words = ["serve", "verifier", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--set", "verifier.sandbox.slots=1"]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-m", "nouscoder", *words],
            stderr=output,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(grader)},
        ) as service,
    ):
        try:
            until(lambda: service.poll() is not None or '"http": "' in log.read_text(), "the service listens")
            address = re.findall(r'"http": "([^"]+)"', log.read_text())
            assert address, log.read_text()[-2000:]
            program = example.replace("127.0.0.1:8000", address[0])
            program += "\nimport sys; print([name for name in sys.modules if name.startswith('nouscoder')])"
            done = python(files, "-c", program, cwd=tmp_path)
        finally:
            service.terminate()
    assert done.returncode == 0, done.stderr
    verdict, modules = done.stdout.splitlines()
    assert verdict == "accepted 1.0"
    assert all(
        name.startswith(("nouscoder.client", "nouscoder.errors")) for name in json.loads(modules.replace("'", '"'))[1:]
    )
