"""The workflows and forms in .github, and .ci/run, name only what exists, and have few permissions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def read(path: Path) -> Any:
    """The content of a YAML file; the key `on` stays a text."""
    return yaml.load(path.read_text("utf8"), Loader=yaml.BaseLoader)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_fixed_actions_few_permissions_and_time_limits(path: Path) -> None:
    used = re.findall(r"uses: (\S+)(.*)", path.read_text("utf8"))
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), f"{action} has no comment with its version"
    workflow = read(path)
    assert workflow["permissions"] == {}
    assert "concurrency" in workflow
    assert all({"timeout-minutes", "permissions"} <= job.keys() for job in workflow["jobs"].values())


def test_every_make_target_of_the_workflows_and_of_ci_exists() -> None:
    texts = [step.get("run", "") for path in WORKFLOWS for job in read(path)["jobs"].values() for step in job["steps"]]
    targets = {name for text in texts for name in re.findall(r"\bmake ([\w-]+)", text)}
    targets |= set(re.findall(r"^\s*part ([\w-]+)", (ROOT / ".ci" / "run").read_text("utf8"), re.MULTILINE))
    assert targets >= {"check", "test", "test-heavy", "test-cluster", "release"}
    makefile = (ROOT / "Makefile").read_text("utf8")
    assert [name for name in sorted(targets) if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []


def test_a_change_is_checked_on_every_python_that_the_package_promises() -> None:
    workflow = read(ROOT / ".github" / "workflows" / "ci.yml")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
    promised = [name.split(" :: ")[-1] for name in project["classifiers"] if name.startswith("Programming Language")]
    assert workflow["on"].keys() == {"push", "pull_request"}
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == promised
    assert project["requires-python"] == f">={promised[0]}"
    assert all(int(job["timeout-minutes"]) <= 15 for job in workflow["jobs"].values())
    assert all(job["permissions"] == {"contents": "read"} for job in workflow["jobs"].values())


def test_workflows_and_ci_need_no_file_outside_the_repository_but_an_optional_cluster() -> None:
    assert [path.name for path in WORKFLOWS if "../" in path.read_text("utf8")] == []
    lines = (ROOT / ".ci" / "run").read_text("utf8").splitlines()
    assert [line for line in lines if "../" in line] == ["cluster=${NOUSCODER_CLUSTER:-../shared/cluster}"]


def test_the_forms_have_what_the_tracker_asks_of_them() -> None:
    forms = [read(path) for path in FORMS if path.name != "config.yml"]
    assert len(forms) >= 3
    for form in forms:
        assert {"name", "description", "body"} <= form.keys()
        identifiers = [field["id"] for field in form["body"]]
        assert len(set(identifiers)) == len(identifiers)
        assert all(field["attributes"]["label"] for field in form["body"])
    assert {path.name for path in FORMS} >= {"config.yml"}


def test_the_folders_whose_dependencies_are_watched_exist() -> None:
    folders = [name for update in read(ROOT / ".github" / "dependabot.yml")["updates"]
               for name in update.get("directories", [update.get("directory")])]  # fmt: skip
    assert len(folders) >= 3
    assert [name for name in folders if not any(ROOT.glob(name.strip("/") or "Makefile"))] == []
