"""docs/architecture.md, docs/design, run/loop.py and the documents for contributors name only what exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "services" / "nouscoder"
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf8")
DESIGN = {path.name: path.read_text(encoding="utf8") for path in sorted((ROOT / "docs" / "design").glob("*.md"))}
FOR_CONTRIBUTORS = (
    *("README.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md", "CHANGELOG.md", "NOTICE", "tests/data/README.md"),
    *("examples/README.md", "examples/own_model_own_problems/README.md"),
)
# CONTRIBUTING.md has the reader make these.
OF_THE_READER = ("objectives/mine.py", "importers/mine.py", "environments/second_thought.py")
SUFFIXES = ("py", "lua", "toml", "md", "proto", "tpl", "c", "css", "js", "yaml")


@cache
def tracked() -> list[str]:
    """The paths of every file and folder of the repository, from its root."""
    tops = [ROOT / name for name in ("services", "docs", "helm", "deploy", "configs", "proto", "tests", "packages")]
    return [str(path.relative_to(ROOT)) for top in tops for path in (top, *top.rglob("*")) if ".pyc" not in path.name]


def named_paths() -> list[str]:
    """The texts in backticks that are paths of the project: folder/, folder/file.py or file.py."""
    prose = "".join(re.sub(r"```.*?```", "", text, flags=re.S) for text in (TEXT, *DESIGN.values()))
    pattern = rf"(?:[a-z_0-9]+/)*(?:[a-z_0-9]+/|[a-z_0-9]+\.(?:{'|'.join(SUFFIXES)}))"
    return sorted({name for name in re.findall(r"`([^`\s]+)`", prose) if re.fullmatch(pattern, name)})


def pictured_paths() -> list[Path]:
    """The paths of the tree at the beginning of the document, with their parent folders."""
    picture = TEXT.split("```")[1]
    found, folders = [], [ROOT]
    for line in picture.splitlines():
        if line.strip():
            depth = (len(line) - len(line.lstrip())) // 2
            folders = [*folders[: depth + 1], folders[depth] / line.split()[0]]
            found.append(folders[-1])
    return found


@pytest.mark.parametrize("name", named_paths())
def test_a_path_in_the_text_exists(name: str) -> None:
    ending = "/" + name.rstrip("/")
    assert any(("/" + path).endswith(ending) for path in tracked()), f"docs/ names {name}"


def paths_from_the_root(name: str) -> list[str]:
    """The paths in a document that begin in the root of the repository, such as tests/domain/ or docs/data.md."""
    tops = "services|tests|docs|examples|configs|deploy|helm|proto|packages"
    found = re.findall(rf"(?<![\w./])(?:{tops})/[\w./-]*\w/?", (ROOT / name).read_text(encoding="utf8"))
    return sorted({path for path in found if not path.endswith(OF_THE_READER)})


@pytest.mark.parametrize("name", [*FOR_CONTRIBUTORS, "docs/architecture.md", *(f"docs/design/{n}" for n in DESIGN)])
def test_the_paths_in_a_document_for_contributors_exist(name: str) -> None:
    assert [path for path in paths_from_the_root(name) if not (ROOT / path).exists()] == []


def test_the_recipes_name_their_files() -> None:
    paths = paths_from_the_root("CONTRIBUTING.md")
    assert sum(path.startswith("services/") for path in paths) >= 15
    assert sum(path.startswith("tests/") for path in paths) >= 15


def test_nothing_for_a_stranger_reaches_outside_the_repository() -> None:
    documents = [ROOT / "Makefile", ROOT / "CONTRIBUTING.md", ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = {path.name: path.read_text(encoding="utf8") for path in (*documents, *(ROOT / "examples").rglob("*.py"))}
    assert [name for name, text in texts.items() if "../shared" in text] == []


@pytest.mark.parametrize("path", pictured_paths(), ids=str)
def test_a_path_in_the_picture_exists(path: Path) -> None:
    assert path.exists()


def test_every_part_of_the_package_is_in_the_picture() -> None:
    parts = {path for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert parts <= set(pictured_paths())


def test_every_page_of_the_design_is_linked() -> None:
    assert sorted(re.findall(r"\(design/([a-z-]+\.md)\)", TEXT)) == sorted(DESIGN)


def test_the_documents_name_many_paths() -> None:
    assert len(named_paths()) > 150
    assert len(pictured_paths()) > 30


def test_the_loops_in_the_docstring_of_the_run_exist() -> None:
    """Lines such as `Class.method, other_function   folder/file.py, other_file.py` in the docstring of run/loop.py."""
    text = (PACKAGE / "run" / "loop.py").read_text(encoding="utf8")
    loops = re.findall(r"^    ([A-Z]\w+\..*?)  +(\w+)/(\w+\.py.*)$", text, flags=re.M)
    assert len(loops) == 4
    for names, folder, files in loops:
        source = "".join((PACKAGE / folder / file).read_text(encoding="utf8") for file in files.split(", "))
        for kind in re.findall(r"\b[A-Z]\w+", names):
            assert f"class {kind}" in source, f"{folder}/{files} has no class {kind}"
        for method in re.findall(r"(?<=\.)[a-z]\w+|_?[a-z]\w+_\w+|_[a-z]\w+", names):
            assert f"def {method}(" in source, f"{folder}/{files} has no {method}"


def test_the_documents_that_the_code_names_exist() -> None:
    """Except `instruction.md`, a file of Harbor's folders."""
    folders = [ROOT.glob("*.md"), *((ROOT / name).rglob("*.md") for name in ("docs", "configs"))]
    documents = ["/" + str(path.relative_to(ROOT)) for folder in folders for path in folder]
    named = {
        name: str(path.relative_to(ROOT))
        for path in [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.lua"), *PACKAGE.rglob("*.c")]
        for name in re.findall(r"(?<![\w./{}<*-])(?:[\w.-]+/)*[\w-]+\.md\b", path.read_text(encoding="utf8"))
    }
    assert len(named) > 20
    assert {name: path for name, path in named.items() if not any(d.endswith("/" + name) for d in documents)} == {
        "instruction.md": named["instruction.md"]
    }
