"""The pages for browsers: the playground at `/`, and Swagger UI on the OpenAPI document at `/docs`.

INVARIANT: a page needs no network access except to its own service. Its Content-Security-Policy allows only scripts of
its folder, by their digests, and requests to its own origin. The playground has its own inline style sheet and script,
by their digests; /docs has style sheets of its own origin, and nothing inline.

playground/highlight.min.js is the published file of highlight.js 11.12.0, unchanged (BSD-3-Clause, highlight.LICENSE).
Where a browser does not load it, the program is shown without colours. docs_page/swagger-ui-bundle.js and
swagger-ui.css are the published files of swagger-ui-dist 5.35.0, unchanged (Apache-2.0, swagger-ui.LICENSE; the
licenses of what the bundle contains are in swagger-ui-bundle.js.LICENSE.txt).
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files

from nouscoder.domain.languages import KNOWN

_IMMUTABLE = "public, max-age=31536000, immutable"  # for a path with a digest: another one for other contents
_HIGHLIGHTER = "playground/highlight.min.js"
_SCRIPTS = ("examples.js", "editor.js", "share.js", "page.js")
_TYPES = {"swagger-ui.css": "text/css", "swagger-ui-bundle.js": "text/javascript", "start.js": "text/javascript"}


@dataclass(frozen=True, slots=True)
class Page:
    """The text of a page or a script, and its HTTP headers."""

    text: str
    headers: dict[str, str]


def playground(languages: Iterable[str], comparators: Iterable[str] = ("tokens",), absent: Iterable[str] = ()) -> Page:
    """The page with these languages and comparators to choose from, without the types of tests in `absent`."""
    style, highlighter = _asset("playground/page.css"), digest_source(_asset(_HIGHLIGHTER))
    script = b'"use strict";\n' + _languages() + b"".join(_asset(f"playground/{name}") for name in _SCRIPTS)
    policy = (
        f"default-src 'none'; style-src '{digest_source(style)}'; "
        f"script-src '{digest_source(script)}' '{highlighter}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    text = _asset("playground/page.html").decode()
    parts = {
        "<!--absent-->": " ".join(absent),
        "<!--languages-->": _options(languages),
        "<!--comparators-->": _options(comparators),
        "<!--highlighter-->": highlighter_path(),
        "<!--integrity-->": highlighter,
        "/*style*/": style.decode(),
        "/*script*/": script.decode(),
    }
    for mark, part in parts.items():
        text = text.replace(mark, part, 1)
    return Page(text, _headers("no-cache", policy))


@functools.cache
def _languages() -> bytes:
    """The first program of each language, and its name in highlight.js. No text in it ends a script element."""
    known = {name: {"starter": one.starter, "highlight": one.highlight} for name, one in KNOWN.items()}
    return f"const LANGUAGES = {json.dumps(known)};\n".replace("<", "\\u003c").encode()


def highlighter_path() -> str:
    """The path of the playground's highlighter."""
    return _path_of(_HIGHLIGHTER, "highlight")


def highlighter() -> Page:
    """The script at `highlighter_path`."""
    return Page(_asset(_HIGHLIGHTER).decode(), _headers(_IMMUTABLE))


def docs_page(title: str) -> Page:
    """The page at /docs, whose parts are at the paths of `docs_parts`."""
    digests = {name: digest_source(_asset(f"docs_page/{name}")) for name in _TYPES}
    # Browsers take digests of scripts in files, but not of style sheets in files.
    scripts = " ".join(f"'{digests[name]}'" for name, kind in _TYPES.items() if kind == "text/javascript")
    policy = (
        f"default-src 'none'; style-src 'self'; script-src {scripts}; connect-src 'self'; img-src data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    styled, *run = (f'"{_docs_path(name)}" integrity="{digest}"' for name, digest in digests.items())
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{html.escape(title)}</title><link rel="icon" href="data:,"><link rel="stylesheet" href={styled}>'
        "</head><body>"
        '<header><a href="/">Playground</a> <a href="/openapi.json">openapi.json</a></header><div id="calls"></div>'
        f"{''.join(f'<script src={one}></script>' for one in run)}</body></html>"
    )
    return Page(text, _headers("no-cache", policy))


def docs_parts() -> dict[str, tuple[bytes, str, dict[str, str]]]:
    """Contents, media type and headers of each part of /docs, by its path."""
    headers = _headers(_IMMUTABLE)
    return {_docs_path(name): (_asset(f"docs_page/{name}"), kind, headers) for name, kind in _TYPES.items()}


def _docs_path(name: str) -> str:
    return _path_of(f"docs_page/{name}", f"docs-{name.rpartition('.')[0]}")


def _path_of(name: str, stem: str) -> str:
    """The path at which an asset is served, with a digest."""
    return f"/{stem}-{hashlib.sha256(_asset(name)).hexdigest()[:12]}.{name.rpartition('.')[2]}"


def _headers(cache: str, policy: str = "") -> dict[str, str]:
    """The headers of a page: how long browsers keep it, and its Content-Security-Policy."""
    headers = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": cache}
    return headers | {"Content-Security-Policy": policy} if policy else headers


def digest_source(text: bytes) -> str:
    """The digest of a script or a style sheet as a Content-Security-Policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text).digest()).decode()


def _options(names: Iterable[str]) -> str:
    return "".join(f"<option>{html.escape(name)}</option>" for name in names)


@functools.cache
def _asset(name: str) -> bytes:
    return files(__package__).joinpath(name).read_bytes()
