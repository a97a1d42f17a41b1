"""deploy/release.py: what keeps a version from being published, the notes, the commands, and the workflow."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

PROJECT = Path(__file__).parents[2]
CHANGELOG = """# Changelog

## [Unreleased]

### Added
- Something new.

## [0.2.0] - 2026-12-01
This is the second.

### Added
- Two things.

## [0.1.0]

### Added
- The first.
"""


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", PROJECT / "deploy" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["release"] = module
    spec.loader.exec_module(module)
    return module


def ready(release: ModuleType, **changed: Any) -> Any:
    """The facts of a tree that can be published, with changes."""
    facts = release.Facts(
        changed=(),
        tags={"v0.1.0": "old"},
        head="abc",
        pushed=True,
        changelog=CHANGELOG,
        on_the_index=True,
        missing=(),
        registry="registry.example/me",
    )
    return dataclasses.replace(facts, **changed)


def test_a_clean_tagged_tree_may_be_published(release: ModuleType) -> None:
    """With the tag at this commit too, as in the workflow."""
    assert release.reasons("0.2.0", ready(release)) == []
    assert release.reasons("0.2.0", ready(release, tags={"v0.1.0": "old", "v0.2.0": "abc"})) == []


@pytest.mark.parametrize(
    ("version", "changed", "reason"),
    [
        ("0.2.0", {"changed": ("a.py", "b.py")}, "a.py and 1 more differ from the commit: commit or remove them"),
        ("0.2.0", {"pushed": False}, "the commit is on no branch of a remote"),
        ("0.2.0", {"tags": {"v0.2.0": "other"}}, "the tag v0.2.0 exists and names another commit"),
        ("0.2.0", {"tags": {"v0.10.0": "other"}}, "v0.10.0 is newer: choose a version above all tags"),
        ("0.3.0", {}, "CHANGELOG.md has no heading '## [0.3.0] - YYYY-MM-DD'"),
        ("0.1.0", {"tags": {}}, "CHANGELOG.md has no date at [0.1.0]"),
        ("0.2.0", {"on_the_index": False}, "messages and documents say that there is no release"),
        ("0.2.0", {"missing": ("helm",)}, "helm is not installed"),
        ("0.2.0", {"registry": "REGISTRY"}, "REGISTRY does not say where images and chart go: REGISTRY=HOST/PATH"),
    ],
)
def test_each_reason_is_one_sentence(release: ModuleType, version: str, changed: dict[str, Any], reason: str) -> None:
    (said,) = release.reasons(version, ready(release, **changed))
    assert said.startswith(reason)
    assert "\n" not in said


@pytest.mark.parametrize(
    "version", ["v0.2.0", "0.2", "0.2.0rc1", "0.2.0-rc.1", "01.2.0", "0.2.0.dev1+gabc", "", "latest"]
)
def test_a_text_that_is_no_version_is_refused(release: ModuleType, version: str) -> None:
    with pytest.raises(release.Refused, match=r"is not of the form X\.Y\.Z"):
        release.reasons(version, ready(release))


def test_the_notes_are_the_part_of_the_version(release: ModuleType) -> None:
    """A rehearsal of a version that the changelog does not have shows what is unreleased."""
    text = release.notes("0.2.0", CHANGELOG, "registry.example/me")
    assert text.endswith("This is the second.\n\n### Added\n- Two things.\n")
    assert "pip install 'nouscoder[demo]==0.2.0'" in text
    assert "helm install nouscoder oci://registry.example/me/charts/nouscoder --version 0.2.0" in text
    assert release.notes("0.3.0", CHANGELOG, "r").endswith("### Added\n- Something new.\n")
    unreleased = release.notes("9.9.9", (PROJECT / "CHANGELOG.md").read_text("utf8"), "r")
    assert unreleased.count("\n- ") > 20


def test_the_tag_comes_last_and_every_file_is_published(release: ModuleType, tmp_path: Path) -> None:
    commands = release.publication("0.2.0", "abc", "registry.example/me", tmp_path)
    programs = [command.words[0] for command in commands]
    assert programs == ["deploy/images/build", "deploy/images/build", "helm", "uv", "gh"]
    assert all(dict(command.variables) == {"NOUSCODER_VERSION": "0.2.0"} for command in commands[:2])
    assert "oci://registry.example/me/charts" in commands[2].words
    assert {Path(word).suffix for word in commands[3].words if word.startswith(str(tmp_path))} == {".gz", ".whl"}
    assert commands[4].words[:6] == ("gh", "release", "create", "v0.2.0", "--target", "abc")
    assert {Path(word).name for word in commands[4].words if word.startswith(str(tmp_path))} == {
        "NOTES.md", "SHA256SUMS", "nouscoder-0.2.0-py3-none-any.whl", "nouscoder-0.2.0.tar.gz", "nouscoder-0.2.0.tgz",
        "nouscoder_grader-0.2.0-py3-none-any.whl", "nouscoder_client-0.2.0-py3-none-any.whl",
    }  # fmt: skip


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the texts that say how to install, and a remote that has its commit."""
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, "/dev/null")
    tree = tmp_path / "clone"
    for name in ("services/nouscoder/installation.py", "README.md", "docs/grading.md", "CHANGELOG.md"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text((PROJECT / name).read_text("utf8"), "utf8")
    git(tmp_path, "init", "-q", "--bare", "remote")
    git(tree, "init", "-q")
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "first")
    git(tree, "remote", "add", "origin", str(tmp_path / "remote"))
    git(tree, "push", "-q", "origin", "HEAD:main")
    return tree


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_the_facts_of_a_clone(release: ModuleType, clone: Path) -> None:
    facts = release.facts_of(clone)
    assert (facts.changed, facts.tags, facts.pushed, facts.on_the_index) == ([], {}, True, False)
    git(clone, "tag", "-a", "v0.1.0", "-m", "annotated")
    git(clone, "tag", "v0.1.0rc1")
    (clone / "new").write_text("")
    git(clone, "commit", "-q", "--allow-empty", "-m", "second")
    facts = release.facts_of(clone)
    assert facts.tags == {"v0.1.0": git(clone, "rev-parse", "v0.1.0^{commit}")}
    assert (facts.changed, facts.pushed, facts.head) == (["new"], False, git(clone, "rev-parse", "HEAD"))
    with pytest.raises(release.Refused, match="in a clone of the repository"):
        release.facts_of(clone.parent)


def test_texts_are_written_in_both_forms(release: ModuleType, clone: Path) -> None:
    """And the second form takes back the first."""
    begun = {path: path.read_text("utf8") for path in clone.rglob("*.*") if ".git" not in path.parts}
    changed = release.write_texts(clone, True)
    assert {path.name for path in changed} == {"installation.py", "README.md", "grading.md"}
    readme = (clone / "README.md").read_text("utf8")
    assert "pip install 'nouscoder[demo]'" in readme
    assert "pip install nouscoder-grader" in readme
    assert release.facts_of(clone).on_the_index
    assert release.write_texts(clone, True) == []
    release.write_texts(clone, False)
    assert {path: path.read_text("utf8") for path in begun} == begun


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["build", "1.0"], "release: '1.0' is not of the form X.Y.Z"),
        (["publish", "v1.0.0"], "release: 'v1.0.0' is not of the form X.Y.Z"),
        ([], "release: usage: release.py build | publish VERSION, or texts index | clone"),
    ],
)
def test_the_command_refuses_in_one_line(release: ModuleType, words: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as exited:
        release.main(words)
    assert exited.value.code == said


def test_the_workflow_has_few_permissions_and_fixed_actions() -> None:
    """It runs on a tag of a version only, stores no token, and does what `make release` does."""
    text = (PROJECT / ".github" / "workflows" / "release.yml").read_text("utf8")
    workflow = yaml.load(text, Loader=yaml.BaseLoader)
    assert workflow["on"] == {"push": {"tags": ["v[0-9]+.[0-9]+.[0-9]+"]}}
    assert workflow["permissions"] == {}
    jobs = workflow["jobs"]
    assert jobs["check"]["permissions"] == {"contents": "read"}
    assert jobs["publish"]["permissions"] == {"contents": "write", "packages": "write", "id-token": "write"}
    assert jobs["publish"]["needs"] == "check"
    assert "secrets." not in text
    used = re.findall(r"uses: (\S+)", text)
    assert used
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in used)
    targets = {found for step in (*jobs["check"]["steps"], *jobs["publish"]["steps"]) for found in re.findall(
        r"\bmake ([\w-]+)", step.get("run", ""))}  # fmt: skip
    makefile = (PROJECT / "Makefile").read_text("utf8")
    assert targets == {"check", "test", "test-release", "release"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    assert "dynamic" in tomllib.loads((PROJECT / "pyproject.toml").read_text("utf8"))["project"]
