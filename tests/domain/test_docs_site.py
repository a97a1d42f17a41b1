"""The pages of the documentation site: every link of a document leads somewhere, and every document has a page."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from deploy.site.built import faults
from deploy.site.pages import BrokenLink, Pages, page, read_pages
from deploy.site.rest_api import grading_document, rest_page

ROOT = Path(__file__).parents[2]
MADE = {"reference/http-api.md"}


@pytest.fixture(scope="module")
def pages() -> Pages:
    return read_pages(ROOT)


def small(root: Path, repository: str | None = None, **texts: str) -> Pages:
    """A repository with these documents in docs/, and a program."""
    (root / "program.py").touch()
    documents = {f"docs/{name}.md": text for name, text in texts.items()}
    return Pages(root, {name: name.removeprefix("docs/") for name in documents}, documents, repository)


def entries(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from entries(value) if isinstance(value, list) else [value]


def test_every_link_of_every_document_leads_somewhere(pages: Pages) -> None:
    made = {name: page(pages, name) for name in pages.places}
    assert len(made) > 50
    assert not [name for name, text in made.items() if "<!-- gives" in text or "```sh tested" in text]


def test_the_navigation_has_every_page_once(pages: Pages) -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf8"))["project"]["nav"]
    assert sorted(entries(nav)) == sorted({*pages.places.values(), *MADE})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[x](gone.md)", "docs/a.md links to gone.md, which does not exist"),
        ("[x](b.md#gone)", "docs/a.md links to b.md#gone, which has no such heading"),
        ("[x](#gone)", "docs/a.md links to #gone, which has no such heading"),
        ("[x, a label of\ntwo lines](../gone.py)", "docs/a.md links to ../gone.py, which does not exist"),
    ],
)
def test_a_dead_link_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(BrokenLink) as error:
        page(small(tmp_path, a=text, b="# B\n"), "docs/a.md")
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("written", "made"),
    [
        ("See docs/b.md, `docs/b.md` and x/b.md.", "See [The b](b.md), `docs/b.md` and x/b.md."),
        ("[b.md, *two\nlines*](b.md#one-two)", "[The b, *two\nlines*](b.md#one-two)"),
        ("`[x](gone.md)` [here](https://example.com)", "`[x](gone.md)` [here](https://example.com)"),
        ("Words:\n- one\n  - two", "Words:\n\n- one\n    - two"),
        ("1. one\n   ```sh tested\n   x\n   ```", "1. one\n    ```sh\n    x\n    ```"),
        ("A table:\n| a |\n|---|", "A table:\n\n| a |\n|---|"),
        ("```sh cluster eventually\n[x](gone.md)\n```\n<!-- gives: x -->", "```sh\n[x](gone.md)\n```"),
    ],
)
def test_a_document_becomes_a_page(written: str, made: str, tmp_path: Path) -> None:
    assert page(small(tmp_path, a=written, b="# The b\n## One, two\n"), "docs/a.md") == made + "\n"


def test_a_link_to_a_program_leads_to_the_repository_where_its_address_is_known(tmp_path: Path) -> None:
    text = "[the program](../program.py)"
    assert page(small(tmp_path, a=text), "docs/a.md") == "the program\n"
    known = small(tmp_path, "https://example.com/blob/main/", a=text)
    assert page(known, "docs/a.md") == "[the program](https://example.com/blob/main/program.py)\n"


def test_the_page_of_the_rest_api_has_every_call_and_every_record_that_it_names() -> None:
    document = grading_document()
    text = rest_page(document)
    for path, item in document["paths"].items():
        assert all(f"\n### {method.upper()} {path}\n" in text for method in item)
    named, there = set(re.findall(r"\]\(#(\w+)\)", text)), set(re.findall(r"^### (\w+)$", text, re.MULTILINE))
    assert len(named) > 25
    assert named <= {name.lower() for name in there}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('<a href="other.html#here">x</a>', None),
        ('<img src="data:image/png;base64,">', None),
        ('<a href="https://example.com/">x</a>', None),
        ('<a href="gone.html">x</a>', "links to gone.html, which does not exist"),
        ('<img src="gone.png">', "links to gone.png, which does not exist"),
        ('<a href="other.html#gone">x</a>', "links to other.html#gone, and there is no such heading"),
        ('<script src="https://example.com/a.js"></script>', "fetches https://example.com/a.js"),
        ('<link rel="stylesheet" href="//example.com/a.css">', "fetches //example.com/a.css"),
    ],
)
def test_the_built_site_is_checked(body: str, said: str | None, tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text('<h1 id="here">x</h1>')
    (tmp_path / "page.html").write_text(body)
    assert list(faults(tmp_path)) == ([f"page.html {said}"] if said else [])


def test_a_style_that_fetches_from_elsewhere_and_a_site_without_pages_are_faults(tmp_path: Path) -> None:
    assert list(faults(tmp_path)) == [f"{tmp_path} has no pages"]
    (tmp_path / "page.html").touch()
    (tmp_path / "a.css").write_text("a { background: url(//example.com/a.png) }")
    assert list(faults(tmp_path)) == ["a.css fetches //example.com/a.png"]
