"""The playground page at `/`: grades a program against tests from a browser. It calls only this service.

INVARIANT: the page needs no network access except to its own service. Its Content-Security-Policy allows only the one
inline style sheet and the one inline script, by their digests, and requests to its own origin.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Page:
    """The text of the page and its HTTP headers."""

    text: str
    headers: dict[str, str]


def playground(languages: Iterable[str], absent: Iterable[str] = ()) -> Page:
    """The page with these languages to choose from, without the types of tests in `absent`."""
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    options = "".join(f"<option>{html.escape(name)}</option>" for name in languages)
    text = _asset("page.html")
    parts = (("<!--absent-->", " ".join(absent)), ("/*style*/", style), ("/*script*/", script))
    for mark, part in (*parts, ("<!--languages-->", options)):
        text = text.replace(mark, part, 1)
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Page(text, headers)


def _asset(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf8")).digest()).decode()
