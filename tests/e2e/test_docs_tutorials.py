"""Runs the tutorials on grading and on training from top to bottom, as a reader would: all blocks in one folder.

A block is run if its fence is `sh tested` or `python tested`, and its output has what the comment after it says. Any
other block of commands names what runs it. tests/cluster/test_docs_operating.py runs the tutorial on a cluster.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.test_docs_commands import BLOCK, GIVES

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
GAIN = re.compile(r"pass@1 on held-out problems: (\S+) before, (\S+) after")
LIMIT_S = 1800  # of a block; all its processes end then


def follow(name: str, folder: Path, url: str = "") -> str:
    """Run every block of a tutorial in `folder`, and return what they print."""
    commands = folder.parent / "bin"
    commands.mkdir()
    (commands / "nouscoder").write_text(f'#!/bin/sh\nexec {sys.executable} -m nouscoder "$@"\n')
    (commands / "nouscoder").chmod(0o755)
    environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
    text = (TUTORIALS / name).read_text(encoding="utf8")
    printed = ""
    for block in BLOCK.finditer(text):
        script = block["script"].replace("http://127.0.0.1:8080", url)
        shell = ["bash", "-euo", "pipefail", "-c"] if block["language"] == "sh" else [sys.executable, "-c"]
        command = ["timeout", str(LIMIT_S), *shell, script]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)
        gives = GIVES.fullmatch(block["after"])
        assert gives is not None, block["script"]
        assert done.returncode == 0, (block["script"], done.stdout[-2000:], done.stderr[-2000:])
        assert gives[1] in done.stdout, (block["script"], done.stdout[-2000:])
        printed += done.stdout
    return printed


@pytest.mark.heavy
def test_a_file_of_samples_is_graded(grading_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    printed = follow("grade.md", folder, grading_url)
    assert "pass@1                      0.5000" in printed
    assert "pass@2                      0.8333" in printed


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_model_of_your_own_learns_problems_of_your_own(tmp_path: Path) -> None:
    folder = tmp_path / "first"
    folder.mkdir()
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    printed = follow("train.md", folder)
    gain = GAIN.search(printed)
    assert gain is not None
    print(f"\npass@1 of the tutorial: {gain[1]} before, {gain[2]} after")
    assert float(gain[2]) > float(gain[1])


@pytest.mark.parametrize("name", ["train.md", "grade.md"])
def test_every_other_block_of_commands_names_what_runs_it(name: str) -> None:
    text = (TUTORIALS / name).read_text(encoding="utf8")
    others = re.findall(r"^```sh\n.*?^```\n([^\n]*)", text, re.DOTALL | re.MULTILINE)
    assert others
    assert all(re.fullmatch(r"<!-- run by: .+ -->", after) for after in others)
