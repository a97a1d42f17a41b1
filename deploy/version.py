#!/usr/bin/env python3
"""version.py: prints the version of this tree. The wheel, the images' labels and the released chart have it.

A clean tree at the tag vX has the version X. Every other one has a version of development, which no package index
takes: N commits after v0.1.0 it is 0.1.1.devN+gCOMMIT, with .dirty at its end where files differ from the commit.
Before the first tag it begins with FIRST. A source distribution keeps the version that it was made with. An archive of
a commit (git archive) knows its tag, and a folder without either is FIRST.dev0. NOUSCODER_VERSION goes before all of
these: a release and the build of an image, which have no repository, are told their version.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIRST = "0.1.0"


def version(root: Path = ROOT) -> str:
    """The version of the tree in `root`, in the form of PEP 440."""
    if given := os.environ.get("NOUSCODER_VERSION"):
        return given
    if (made := root / "PKG-INFO").is_file():
        return made.read_text("utf8").partition("\nVersion: ")[2].split()[0]
    if (root / ".git").exists():
        described = _git(root, "describe", "--tags", "--match=v[0-9]*", "--long", "--abbrev=12", "--dirty")
        return from_description(described) if described else _untagged(root)
    archived = root / ".git_archival.txt"
    described = archived.read_text("utf8").strip() if archived.is_file() else ""
    return from_description(described) or f"{FIRST}.dev0"


def from_description(described: str) -> str:
    """The version for a line of `git describe`, such as v0.1.0 or v0.1.0-3-gabc-dirty; "" for another text."""
    found = re.fullmatch(r"v(\d[^-]*)(?:-(\d+)-g([0-9a-f]+))?(-dirty)?", described)
    if found is None:
        return ""
    tag, num_commits, commit, dirty = found.groups()
    if not dirty and not int(num_commits or 0):
        return tag
    following = re.sub(r"\d+$", lambda last: str(int(last[0]) + 1), tag)
    return f"{following}.dev{num_commits or 0}+g{commit or 'unknown'}{'.dirty' if dirty else ''}"


def _untagged(root: Path) -> str:
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    dirty = ".dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else ""
    return f"{FIRST}.dev{_git(root, 'rev-list', '--count', 'HEAD') or 0}+g{commit or 'unknown'}{dirty}"


def _git(root: Path, *words: str) -> str:
    """The output of git; "" when it fails or is not installed."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.stdout.write(f"{version()}\n")
