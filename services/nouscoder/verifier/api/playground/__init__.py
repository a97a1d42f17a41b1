"""The playground page at `/`: grades a program against tests from a browser. It calls only this service.

INVARIANT: the page needs no network access except to its own service. Its Content-Security-Policy allows only the one
inline style sheet, the one inline script and the highlighter, by their digests, and requests to its own origin.

highlight.min.js is the published file of highlight.js 11.12.0, unchanged (BSD-3-Clause, highlight.LICENSE). Where a
browser does not load it, the program is shown without colours.
"""

from __future__ import annotations

import hashlib
import html
from collections.abc import Iterable
from importlib.resources import files

from nouscoder.verifier.api.page import Page, digest_source, headers_of

_SCRIPTS = ("examples.js", "editor.js", "share.js", "page.js")


def playground(languages: Iterable[str], comparators: Iterable[str] = ("tokens",), absent: Iterable[str] = ()) -> Page:
    """The page with these languages and comparators to choose from, without the types of tests in `absent`."""
    style, highlighter = _asset("page.css"), digest_source(_asset("highlight.min.js"))
    script = '"use strict";\n' + "".join(map(_asset, _SCRIPTS))
    policy = (
        f"default-src 'none'; style-src '{digest_source(style)}'; "
        f"script-src '{digest_source(script)}' '{highlighter}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    text = _asset("page.html")
    parts = {
        "<!--absent-->": " ".join(absent),
        "<!--languages-->": _options(languages),
        "<!--comparators-->": _options(comparators),
        "<!--highlighter-->": highlighter_path(),
        "<!--integrity-->": highlighter,
        "/*style*/": style,
        "/*script*/": script,
    }
    for mark, part in parts.items():
        text = text.replace(mark, part, 1)
    return Page(text, headers_of("no-cache", policy))


def highlighter_path() -> str:
    """The path of the highlighter: another one for other contents, so that browsers may keep it."""
    return f"/highlight-{hashlib.sha256(_asset('highlight.min.js').encode()).hexdigest()[:12]}.js"


def highlighter() -> Page:
    """The script at `highlighter_path`."""
    return Page(_asset("highlight.min.js"), headers_of("public, max-age=31536000, immutable"))


def _options(names: Iterable[str]) -> str:
    return "".join(f"<option>{html.escape(name)}</option>" for name in names)


def _asset(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf8")
