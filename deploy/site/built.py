"""What is wrong with the built site: dead links, missing headings, and files that a page would fetch from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes that make a browser fetch a file; a link is fetched only when it is followed.
_FETCHED = {
    ("script", "src"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("link", "href"),
    ("object", "data"),
}
_RELATIONS = {"stylesheet", "icon", "preload", "modulepreload", "preconnect", "prefetch", "manifest", "dns-prefetch"}
_OF_A_STYLE = re.compile(r"""url\(\s*['"]?([^)'"]+)|@import\s+['"]([^'"]+)""")


@dataclass
class _Reader(HTMLParser):
    """The links, fetched files and headings of a page."""

    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.names.update(value for name, value in values.items() if name in ("id", "name"))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and not _RELATIONS & set(values.get("rel", "").split()):
            return
        self.fetched += [value for name, value in values.items() if (tag, name) in _FETCHED]


def faults(root: Path) -> Iterator[str]:
    """One sentence for each fault of the site in folder `root`."""
    readers = {path: _read(path) for path in sorted(root.rglob("*.html"))}
    if not readers:
        yield f"{root} has no pages"
    for path, reader in readers.items():
        name = path.relative_to(root)
        for link in dict.fromkeys(reader.links + reader.fetched):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in reader.fetched and parts.scheme != "data":
                    yield f"{name} fetches {link}"
                continue
            target = _file(root, path, parts.path)
            if not target.is_file():
                yield f"{name} links to {link}, which does not exist"
            elif parts.fragment and target in readers and unquote(parts.fragment) not in readers[target].names:
                yield f"{name} links to {link}, and there is no such heading"
    for path in sorted(root.rglob("*.css")):
        for found in _OF_A_STYLE.finditer(path.read_text(encoding="utf8")):
            address = found[1] or found[2]
            if urlsplit(address).netloc:
                yield f"{path.relative_to(root)} fetches {address}"


def weights(root: Path) -> Iterator[tuple[str, int, int]]:
    """(page, bytes of the page and its pictures, bytes of the scripts and styles that all pages share)."""
    for path in sorted(root.rglob("*.html")):
        reader = _read(path)
        files = {_file(root, path, urlsplit(one).path) for one in reader.fetched if not urlsplit(one).scheme}
        sizes = {file: file.stat().st_size for file in files if file.is_file()}
        shared = sum(size for file, size in sizes.items() if file.suffix in (".js", ".css"))
        yield str(path.relative_to(root)), path.stat().st_size + sum(sizes.values()) - shared, shared


def _read(path: Path) -> _Reader:
    reader = _Reader()
    reader.feed(path.read_text(encoding="utf8"))
    return reader


def _file(root: Path, page: Path, address: str) -> Path:
    """The file that an address on a page names."""
    if not address:
        return page
    plain = unquote(address)
    found = (root / plain.lstrip("/") if plain.startswith("/") else page.parent / plain).resolve()
    return found / "index.html" if plain.endswith("/") or found.is_dir() else found
