"""The page at `/`: try a program against tests in a browser. It asks this service and nothing else.

INVARIANT: the page needs no network but its own service; its policy (Content-Security-Policy) allows the one style
sheet and the one script written into it, by their digests, and requests to its own origin.
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
    """The page's text and the headers it is sent with."""

    text: str
    headers: dict[str, str]


def playground(languages: Iterable[str]) -> Page:
    """The page, offering `languages`."""
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    options = "".join(f"<option>{html.escape(name)}</option>" for name in languages)
    text = _asset("page.html")
    for mark, part in (("/*style*/", style), ("/*script*/", script), ("<!--languages-->", options)):
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
