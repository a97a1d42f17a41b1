"""The frame of every report: one file with its style and its script.

INVARIANT: the page makes no network request. Its Content-Security-Policy allows only the one inline style sheet and the
one inline script, by their digests.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from string import Template

from nouscoder.report.markup import escape


def html_page(
    title: str, headline: str, sections: Iterable[str], notes: str = "", assets: Sequence[str] = ("page",)
) -> str:
    """The whole page. `title` is text; the other texts are markup. `assets` have its styles and scripts."""
    style, script = ("".join(_asset(f"{name}.{kind}") for name in assets) for kind in ("css", "js"))
    return Template(_asset("page.html")).substitute(
        title=escape(title),
        policy=f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'",
        style=style,
        script=script,
        headline=headline,
        sections="".join(sections),
        notes=notes,
    )


def section(title: str, content: str) -> str:
    """A section. `title` and `content` are markup."""
    return f"<section><h2>{title}</h2>{content}</section>"


def tiles(facts: dict[str, str]) -> str:
    """Names and values side by side. Both are markup."""
    pairs = (f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    return f'<dl class="tiles">{"".join(pairs)}</dl>'


def _asset(name: str) -> str:
    return files("nouscoder.report").joinpath(name).read_text(encoding="utf8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf8")).digest()).decode()
