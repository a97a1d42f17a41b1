"""deploy/setup-venv installs no GPU libraries where there is no GPU, and nothing that the Python cannot build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "nvidia-cublas", "nvidia-cuda-runtime", "nvidia-cuda-cupti", "cuda-toolkit", "triton", "trl")
NOTED = """#!/bin/sh
echo "$(basename "$0") $*" >>calls
while [ $# -gt 0 ]; do [ "$1" != -r ] || cat "$2" >installed; shift; done
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the script needs, with a venv whose python and uv only note how they are called."""
    (tmp_path / "deploy").mkdir()
    shutil.copy(ROOT / "deploy" / "setup-venv", tmp_path / "deploy")
    (tmp_path / "requirements").mkdir()
    lock = "".join(f"{name}==1 \\\n    --hash=sha256:00\n" for name in PACKAGES)
    for name in ("demo", "test-trainers"):
        (tmp_path / "requirements" / f"{name}.txt").write_text(lock)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "uv"):
        program = tmp_path / ".venv" / "bin" / name
        program.write_text(NOTED)
        program.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("what", "asked", "has_driver", "is_cpu"),
    [
        ("demo", "", False, True),
        ("demo", "", True, False),
        ("demo", "cuda", False, False),
        ("demo", "cpu", True, True),
        ("test-trainers", "", False, False),
    ],
)
def test_gpu_libraries_are_left_out_where_there_is_no_gpu(
    what: str, asked: str, has_driver: bool, is_cpu: bool, tree: Path
) -> None:
    """Before, the environment of a demo on a CPU had 3.4 GB of libraries that nothing called."""
    driver = tree / "nvidiactl"
    if has_driver:
        driver.touch()
    environment = {**os.environ, "DRIVERS": str(driver), "ACCELERATOR": asked}
    done = subprocess.run(
        ["sh", "deploy/setup-venv", what], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    calls = (tree / "calls").read_text()
    installed = [line.partition("==")[0] for line in (tree / "installed").read_text().splitlines() if "==" in line]
    left_out = ("nvidia-cublas", "cuda-toolkit", "triton") if is_cpu else ()
    assert installed == [name for name in PACKAGES if name not in left_out]
    assert (tree / "installed").read_text().count("--hash") == len(installed)
    assert ("python deploy/images/empty_cuda.py" in calls) is is_cpu
    assert ("make ACCELERATOR=cuda" in done.stdout) is is_cpu


@pytest.mark.parametrize("version", [(3, 13), (3, 14)])
def test_the_library_of_the_fuzzers_is_left_out_where_it_has_no_wheel(version: tuple[int, int], tree: Path) -> None:
    """It has none for Python 3.14, and to build it from source takes LLVM, so `make test` ended in an error."""
    (tree / "requirements" / "dev.txt").write_text(
        "atheris==3 \\\n    --hash=sha256:00\npydantic==2 \\\n    --hash=sha256:00\n"
    )
    ask = f'exec {sys.executable} -c "import sys; sys.version_info = {version}; $2"'
    (tree / ".venv" / "bin" / "python").write_text(f"#!/bin/sh\ncase $2 in *version_info*) {ask};; esac\n")
    done = subprocess.run(
        ["sh", "deploy/setup-venv", "dev"], cwd=tree, env={**os.environ, "ACCELERATOR": "cuda"}, check=False
    )
    assert done.returncode == 0
    installed = [line.partition("==")[0] for line in (tree / "installed").read_text().splitlines() if "==" in line]
    assert installed == (["pydantic"] if version >= (3, 14) else ["atheris", "pydantic"])
