"""The wheel in fresh environments: with the extra `client`, and with `cli`.

An environment holds the built wheel and the packages that its extra names, as links to those of this environment, so no
network is needed. `make test-release` installs every extra from a package index.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from importlib.metadata import PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nouscoder.installation import how_to_install

PROJECT = Path(__file__).parents[2]
SCRIPT = """
import nouscoder.client as grading
with grading.Client("http://127.0.0.1:9", grading.Patience(unreachable_s=0.0)) as client:
    try:
        client.grade(code="", tests={})
    except grading.GradingFailed as error:
        print(f"{type(error).__name__}: {error}")
import sys

from nouscoder.installation import how_to_install

for name in ("pydantic", "typer", "rich", "tenacity", "fastapi", "grpc", "torch", "redis"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    print(name, "is installed")
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the wheel, and the names of its packages."""

    python: Path
    site_packages: Path
    packages: set[str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=PROJECT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def fresh(wheel: Path) -> Environment:
    return environment(wheel, "client")


def environment(wheel: Path, extra: str) -> Environment:
    """A new environment with the wheel and what its extra names."""
    folder = wheel.parent / extra
    venv.create(folder / "venv", with_pip=False)
    (site_packages,) = (folder / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site_packages)
    (metadata,) = site_packages.glob("nouscoder-*.dist-info")
    names = dependencies_of(PathDistribution(metadata).requires or [], extra)
    for name in names:
        copy(name, site_packages)
    return Environment(folder / "venv" / "bin" / "python", site_packages, {"nouscoder", *names})


def dependencies_of(requirements: list[str], extra: str) -> set[str]:
    """The distributions that the extra of this project installs, with their own dependencies."""
    found: set[str] = set()
    waiting = [(requirements, {extra})]
    while waiting:
        texts, extras = waiting.pop()
        for needed in map(Requirement, texts):
            wanted = needed.marker is None or any(needed.marker.evaluate({"extra": each}) for each in ("", *extras))
            name = canonicalize_name(needed.name)
            if wanted and name == "nouscoder":  # an extra that another one includes
                waiting.append((requirements, set(needed.extras)))
            elif wanted and name not in found:
                found.add(name)
                waiting.append((distribution(name).requires or [], set(needed.extras)))
    return found


def copy(name: str, site_packages: Path) -> None:
    """Link the files of an installed package, without its scripts."""
    for file in distribution(name).files or []:
        source, parts = Path(str(file.locate())), file.parts
        if ".." not in parts and "__pycache__" not in parts and source.is_file():
            (site_packages / file).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(source, site_packages / file)


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link; a copy where the two are on different file systems."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def test_the_client_alone_has_under_10_packages_and_none_of_a_service(fresh: Environment) -> None:
    num_bytes = sum(file.stat().st_size for file in fresh.site_packages.rglob("*") if file.is_file())
    print(f"nouscoder[client]: {len(fresh.packages)} packages, {num_bytes / 1e6:.1f} MB: {sorted(fresh.packages)}")
    assert "httpx" in fresh.packages
    assert len(fresh.packages) < 10
    done = subprocess.run([fresh.python, "-I", "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [done.stdout.splitlines()[0]]
    assert done.stdout.startswith("Unreachable: the grading service does not answer")


def test_the_wheel_has_its_licences(fresh: Environment) -> None:
    (metadata,) = fresh.site_packages.glob("nouscoder-*.dist-info")
    headers = PathDistribution(metadata).metadata
    assert headers["License-Expression"] == "Apache-2.0"
    names = {Path(name).name for name in headers.get_all("License-File") or ()}
    of_pages = {"uPlot.LICENSE", "highlight.LICENSE", "swagger-ui.LICENSE", "swagger-ui-bundle.js.LICENSE.txt"}
    assert names == {"LICENSE", "NOTICE", *of_pages}
    assert names <= {path.name for path in metadata.rglob("*")}


def test_the_wheel_has_the_recipes_and_the_selections(fresh: Environment) -> None:
    """So `nouscoder recipes` and `data filter NAME` find them without the source."""
    inside, outside = fresh.site_packages / "nouscoder" / "configs", PROJECT / "configs"
    names = {path.relative_to(outside) for path in outside.rglob("*.toml")}
    assert {path.relative_to(inside) for path in inside.rglob("*.toml")} == names


def test_the_command_line_of_the_client_alone_says_what_to_install(fresh: Environment) -> None:
    command = [str(fresh.python), "-I", "-m", "nouscoder", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 78
    assert done.stderr.startswith("nouscoder: the library ")
    assert how_to_install("demo") in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_command_line_works_with_its_own_extra(wheel: Path, tmp_path: Path) -> None:
    """It names the version of the wheel, and has the recipes."""
    python = environment(wheel, "cli").python
    version = wheel.name.split("-")[1]
    assert ran(python, tmp_path, "--version") == f"nouscoder {version}\n"
    assert "dapo" in ran(python, tmp_path, "recipes")


def ran(python: Path, folder: Path, *words: str) -> str:
    """The output of `nouscoder WORDS` in that folder."""
    command = [str(python), "-I", "-m", "nouscoder", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
