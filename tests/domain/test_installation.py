"""Every text that tells a person to install this project says the form that works: that of installation.py."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from nouscoder import installation

ROOT = Path(__file__).parents[2]
TOLD = re.compile(r"(?:pip|uv pip|uv tool|pipx) install\s+['\"]?(?:nouscoder|\.)\[([^]]+)\]['\"]?")
IN_CODE = re.compile(r"nouscoder\[\w|'\.\[\w")
TREES = ("docs/**/*.md", "examples/**/*.py", "examples/**/*.md", "helm/**/*.md", "helm/**/*.txt")
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(path for tree in TREES for path in sorted(ROOT.glob(tree))),
]


@pytest.mark.parametrize(
    ("on_the_index", "command", "message"),
    [
        (False, "pip install '.[verifier,math]'", "pip install '.[verifier,math]' " + installation.IN_A_CLONE),
        (True, "pip install 'nouscoder[verifier,math]'", "pip install 'nouscoder[verifier,math]'"),
    ],
)
def test_one_constant_decides_the_form(
    monkeypatch: pytest.MonkeyPatch, on_the_index: bool, command: str, message: str
) -> None:
    monkeypatch.setattr(installation, "ON_THE_INDEX", on_the_index)
    assert installation.install_command("verifier", "math") == command
    assert installation.how_to_install("verifier", "math") == message


def test_documents_say_the_form_that_works() -> None:
    """Each names only extras that exist."""
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]["optional-dependencies"])
    wrong, told = [], 0
    for path in DOCUMENTS:
        for found in TOLD.finditer(path.read_text("utf8")):
            told += 1
            names = found[1].split(",")
            right = installation.install_command(*names)
            if " ".join(found[0].split()) != right or not set(names) <= extras:
                wrong.append(f"{path.relative_to(ROOT)}: {found[0]!r} must be {right!r}, with extras of pyproject.toml")
    assert told > 10, "the pattern finds nothing any more"
    assert wrong == [], "deploy/release.py texts writes the form into the documents"
    install = (ROOT / "README.md").read_text("utf8").partition("## Install")[2].partition("\n## ")[0]
    assert ("There is no release" in install) != installation.ON_THE_INDEX


def test_messages_take_the_form_from_one_place() -> None:
    """No module of the package has the command, or the name of an extra, as a text of its own."""
    package = ROOT / "services" / "nouscoder"
    own = {package / "installation.py"}
    texts = {path: path.read_text("utf8") for path in package.rglob("*.py") if path not in own}
    assert [f"{path.relative_to(ROOT)}" for path, text in texts.items() if IN_CODE.search(text)] == []
