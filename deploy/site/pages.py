"""The pages of the documentation site, made of the Markdown files of this repository.

INVARIANT: a link of a page leads to a page of the site and to a heading that it has, to a picture beside it, or to a
file of the repository that exists. `BrokenLink` names the first one that does not.

The documents are written for readers of the repository: they link to each other by relative paths, and name further
documents as plain text, such as docs/data.md. Here each of those becomes a link that has the title of its page. A link
to any other file leads to `Repository` of [project.urls] in pyproject.toml. Without that key the site has the words of
the link alone. Lists and fences get the form that Python-Markdown reads.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Documents outside of docs/ that are pages, with their place on the site.
BESIDE = {
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "helm/nouscoder/README.md": "chart.md",
    "examples/README.md": "examples.md",
    "examples/own_model_own_problems/README.md": "own-model.md",
}
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^`\n]*$")
# Code, which stays as it is; a link; or a document that is only named.
_PART = re.compile(
    r"(?P<code>`+[^`]+`+)"
    r"|(?P<picture>!?)\[(?P<label>[^\]]*)\]\((?P<target>[^)\s]+)\)"
    r"|(?P<name>(?<![\w./-])(?:[\w-]+/)*[\w-]+\.md(?![\w/]))"
)
_ITEM = re.compile(r"^(?P<indent> *)(?:[-*]|\d+\.) ")
_NOTE_OF_A_TEST = re.compile(r"^ *<!-- (?:gives|run by|values|end of).*-->$")
_HEADING = re.compile(r"^(#{1,6}) (.+)$", re.MULTILINE)


class BrokenLink(Exception):
    """A link of a document leads nowhere. The message names both."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Every document that becomes a page: its text by its path in the repository, and its place on the site."""

    root: Path
    places: Mapping[str, str]
    texts: Mapping[str, str]
    repository: str | None  # the address of its files, with a slash at the end
    headings: dict[str, frozenset[str]] = field(default_factory=dict)

    def title(self, name: str) -> str:
        """The first heading of a document, up to a colon, as the words of a link."""
        found = _HEADING.search(self.texts[name])
        return found[2].partition(":")[0].replace("`", "") if found else name

    def anchors(self, name: str) -> frozenset[str]:
        """The names of the headings of a document, as GitHub and the site make them."""
        if name not in self.headings:
            self.headings[name] = frozenset(anchors_of(self.texts[name]))
        return self.headings[name]


def read_pages(root: Path) -> Pages:
    """The documents of the repository in `root`."""
    docs = sorted(path.relative_to(root).as_posix() for path in (root / "docs").rglob("*.md"))
    places = {**{name: name.removeprefix("docs/") for name in docs}, **BESIDE}
    texts = {name: (root / name).read_text(encoding="utf8") for name in places}
    urls = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf8"))["project"].get("urls", {})
    home = urls.get("Repository")
    return Pages(root, places, texts, f"{home.rstrip('/')}/blob/main/" if home else None)


def anchors_of(text: str) -> Iterator[str]:
    """The anchor of each heading: lower case, spaces become hyphens, other punctuation is left out."""
    seen: dict[str, int] = {}
    for _, title in _HEADING.findall(_without_fences(text)):
        plain = _PART.sub(lambda part: part["label"] or part[0], title)
        anchor = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        repeated = seen.get(anchor, -1) + 1
        seen[anchor] = repeated
        yield f"{anchor}_{repeated}" if repeated else anchor


def _without_fences(text: str) -> str:
    kept, inside = [], False
    for line in text.splitlines():
        inside ^= bool(_FENCE.match(line))
        if not inside:
            kept.append(line)
    return "\n".join(kept)


def page(pages: Pages, name: str) -> str:
    """The text of the page of document `name`. Raises BrokenLink."""
    return "\n".join(_layout(_linked(pages, name, pages.texts[name].splitlines()))) + "\n"


def _linked(pages: Pages, name: str, lines: list[str]) -> Iterator[str]:
    """The lines with the links of the site and plain fences, without the notes that tests read."""
    inside = False
    prose: list[str] = []  # a link may go on in the next line
    for line in lines:
        if fence := _FENCE.match(line):
            yield from _with_links(pages, name, prose)
            yield line if inside else f"{fence['indent']}```{fence['language']}"
            prose, inside = [], not inside
        elif inside:
            yield line
        elif not _NOTE_OF_A_TEST.match(line):
            prose.append(line)
    yield from _with_links(pages, name, prose)


def _with_links(pages: Pages, name: str, prose: list[str]) -> list[str]:
    def made(part: re.Match[str]) -> str:
        if part["target"]:
            return _link(pages, name, part)
        return _named(pages, name, part["name"]) if part["name"] else part[0]

    return _PART.sub(made, "\n".join(prose)).split("\n") if prose else []


def _link(pages: Pages, name: str, link: re.Match[str]) -> str:
    """A link that is written out."""
    target, _, anchor = link["target"].partition("#")
    if re.match(r"[a-z]+:", link["target"]):
        return link[0]
    found = posixpath.normpath(posixpath.join(posixpath.dirname(name), target)) if target else name
    if found in pages.places:
        if anchor and anchor not in pages.anchors(found):
            raise BrokenLink(f"{name} links to {link['target']}, which has no such heading")
        label = re.sub(r"^[\w/-]+\.md", lambda _: pages.title(found), link["label"])
        place = _from_page(pages, name, pages.places[found]) if target else ""
        return f"[{label}]({place}{'#' + anchor if anchor else ''})"
    if not (pages.root / found).exists():
        raise BrokenLink(f"{name} links to {link['target']}, which does not exist")
    if found.startswith("docs/"):  # a picture, which is copied
        return f"{link['picture']}[{link['label']}]({_from_page(pages, name, found.removeprefix('docs/'))})"
    return f"[{link['label']}]({pages.repository}{found})" if pages.repository else link["label"]


def _named(pages: Pages, name: str, words: str) -> str:
    """A document that the text names becomes a link."""
    beside = posixpath.normpath(posixpath.join(posixpath.dirname(name), words))
    document = next((one for one in (words, beside) if one in pages.places and one != name), None)
    if document is None:
        return words
    return f"[{pages.title(document)}]({_from_page(pages, name, pages.places[document])})"


def _from_page(pages: Pages, name: str, place: str) -> str:
    return posixpath.relpath(place, posixpath.dirname(pages.places[name]) or ".")


def _layout(lines: Iterator[str]) -> Iterator[str]:
    """The lines as Python-Markdown reads them: a blank line before a list or a table, and nested parts 4 deep."""
    before, inside, deeper = "", False, 0
    for line in lines:
        item, fence = _ITEM.match(line), _FENCE.match(line)
        indent = len(line) - len(line.lstrip())
        if not inside:
            if item and not indent:
                deeper = 4 - (3 if line[0].isdigit() else 2)
            elif line and not indent:
                deeper = 0
            starts = (item and not _ITEM.match(before)) or (line.startswith("|") and not before.startswith("|"))
            if starts and before.strip() and not before.startswith((" ", "<")) and (not deeper or not indent):
                yield ""
        yield " " * deeper + line if deeper and indent else line
        inside ^= bool(fence)
        before = line
