"""Runs the commands and programs of README.md and of three pages of docs/ (`DOCUMENTS`), with a running service.

A block is run if its fence is `sh tested` or `python tested`. A following comment `<!-- gives: ... -->` names a part of
its output.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"^```(?P<language>sh|python) tested\n(?P<script>.*?)^```\n(?P<after>[^\n]*)", re.DOTALL | re.MULTILINE
)
DOCUMENTS = ("README.md", "docs/grading.md", "docs/trainers.md", "docs/protocols.md")
GIVES = re.compile(r"<!-- gives: (.*) -->")


def blocks() -> list[tuple[str, str, str, str]]:
    """(position, language, script, next line) of every block."""
    found = []
    for name in DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append((f"{name}:{line}", match["language"], match["script"], match["after"]))
    return found


BLOCKS = blocks()


def test_each_document_has_blocks_with_their_output() -> None:
    assert {where.split(":")[0] for where, *_ in BLOCKS} == set(DOCUMENTS)
    assert [where for where, _, _, after in BLOCKS if not GIVES.fullmatch(after)] == []


def test_an_example_for_a_trainer_is_shorter_than_30_lines() -> None:
    long = [where for where, language, script, _ in BLOCKS if language == "python" and script.count("\n") >= 30]
    assert not long


@pytest.mark.parametrize(
    ("language", "script", "after"), [block[1:] for block in BLOCKS], ids=[block[0] for block in BLOCKS]
)
def test_a_documented_command_gives_its_documented_output(
    language: str, script: str, after: str, grading_url: str, tmp_path: Path
) -> None:
    script = script.replace("http://127.0.0.1:8080", grading_url).replace(".venv/bin/nouscoder", "nouscoder")
    (tmp_path / "nouscoder").write_text(f'#!/bin/sh\nexec {sys.executable} -m nouscoder "$@"\n')
    (tmp_path / "nouscoder").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    shell, interpreter = ["bash", "-euo", "pipefail", "-c", script], [sys.executable, "-c", script]
    command = shell if language == "sh" else interpreter
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=environment, cwd=tmp_path
    )
    gives = GIVES.fullmatch(after)
    assert gives is not None
    assert done.returncode == 0, done.stderr
    assert gives[1] in done.stdout
