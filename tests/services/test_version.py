"""deploy/version.py: the version of a tree comes from the tag of its commit, wherever the tree comes from."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

import nouscoder

PROJECT = Path(__file__).parents[2]
VERSION: Callable[[Path], str] = runpy.run_path(str(PROJECT / "deploy" / "version.py"))["version"]
FROM_DESCRIPTION: Callable[[str], str] = runpy.run_path(str(PROJECT / "deploy" / "version.py"))["from_description"]


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs git in a new repository with one commit, at tmp_path/tree."""
    monkeypatch.delenv("NOUSCODER_VERSION", raising=False)
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, "/dev/null")
    tree = tmp_path / "tree"
    tree.mkdir()

    def run(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main", *words]
        return subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True).stdout.strip()

    run("init", "-q")
    for name in (".gitattributes", ".git_archival.txt"):
        shutil.copy(PROJECT / name, tree / name)
    run("add", ".")
    run("commit", "-q", "-m", "first")
    return run


def test_a_repository_says_its_tag_or_a_version_of_development(git: Callable[..., str], tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    commit = git("rev-parse", "--short=12", "HEAD")
    assert VERSION(tree) == f"0.1.0.dev1+g{commit}"
    (tree / ".gitattributes").write_text("# changed\n")
    assert VERSION(tree) == f"0.1.0.dev1+g{commit}.dirty"
    git("checkout", "-q", ".")
    git("tag", "chart-3")  # a tag of another kind
    git("tag", "v0.1.0")
    assert VERSION(tree) == "0.1.0"
    (tree / ".gitattributes").write_text("# changed\n")
    assert VERSION(tree) == f"0.1.1.dev0+g{commit}.dirty"
    git("commit", "-q", "-a", "-m", "second")
    assert VERSION(tree) == f"0.1.1.dev1+g{git('rev-parse', '--short=12', 'HEAD')}"


def test_an_archive_of_a_tag_says_the_tag(git: Callable[..., str], tmp_path: Path) -> None:
    """As the archives of a repository's web page do. In another repository it does not say that one's version."""
    git("tag", "v0.2.0")
    git("archive", "--prefix=unpacked/", "-o", str(tmp_path / "a.zip"), "HEAD")
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        archive.extractall(tmp_path)
    assert VERSION(tmp_path / "unpacked") == "0.2.0"
    assert VERSION(tmp_path) == "0.1.0.dev0"


def test_a_source_distribution_and_a_build_without_repository_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOUSCODER_VERSION", raising=False)
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: nouscoder\nVersion: 0.3.0\nSummary: x\n")
    assert VERSION(tmp_path) == "0.3.0"
    monkeypatch.setenv("NOUSCODER_VERSION", "0.4.0")
    assert VERSION(tmp_path) == "0.4.0"


@pytest.mark.parametrize(
    ("described", "version"),
    [
        ("v1.2.3", "1.2.3"),
        ("v1.2.3-0-gabc", "1.2.3"),
        ("v1.2.3-7-gabc", "1.2.4.dev7+gabc"),
        ("v1.2.3rc1-7-gabc", "1.2.3rc2.dev7+gabc"),
        ("v1.2.3-7-gabc-dirty", "1.2.4.dev7+gabc.dirty"),
        ("$Format:%(describe:tags=true,match=v[0-9]*)$", ""),
        ("%(describe:tags=true)", ""),
        ("", ""),
    ],
)
def test_versions_of_development_are_between_their_tags(described: str, version: str) -> None:
    assert FROM_DESCRIPTION(described) == version
    if "dev" in version:
        tag = Version(re.split(r"-\d+-g", described)[0])
        assert tag < Version(version) < Version(re.sub(r"\.dev.*", "", version))
        assert Version(version).local is not None, "a package index would take it"


def test_one_place_has_the_version() -> None:
    """pyproject.toml has none of its own; what is installed says what its metadata says."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text("utf8"))
    assert "version" not in project["project"]
    said = subprocess.run(
        [sys.executable, "-m", "hatchling", "version"], cwd=PROJECT, check=True, capture_output=True, text=True
    ).stdout.strip()
    assert said == VERSION(PROJECT)
    assert Version(nouscoder.__version__)
    home = yaml.safe_load((PROJECT / "helm" / "nouscoder" / "Chart.yaml").read_text("utf8")).get("home")
    assert home in (None, project["project"]["urls"]["Repository"])
