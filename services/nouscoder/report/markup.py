"""The markup of reports: text that is escaped for the page, and the frame of every report with its style and script.

Programs are model output and may be hostile.

INVARIANT: the result of `escape` cannot open or close an element or an attribute, or change the direction of the text
around it.

INVARIANT: the page makes no network request. Its Content-Security-Policy allows only the one inline style sheet and the
one inline script, by their digests.
"""

from __future__ import annotations

import base64
import hashlib
import html
import unicodedata
from collections.abc import Iterable, Sequence
from importlib.resources import files
from string import Template

MAX_CHARACTERS = 6000
_KEPT_CONTROLS = "\n\t"


def escape(text: object) -> str:
    """`text` for an element or a quoted attribute. Invisible characters are shown as escapes."""
    return html.escape(visible(str(text)), quote=True)


def visible(text: str) -> str:
    """`text` with its invisible characters as escapes, such as a right-to-left override."""
    return "".join(map(_visible, text))


def clip(text: str) -> str:
    """The start of a long text, with a note of how many characters are missing."""
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}\n[{len(text) - MAX_CHARACTERS} more characters]"


def _visible(character: str) -> str:
    """An escape for control, format (such as right-to-left override), surrogate and private characters."""
    if character in _KEPT_CONTROLS or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co"):
        return character
    return f"\\u{ord(character):04x}"


def html_page(
    title: str, headline: str, sections: Iterable[str], notes: str = "", assets: Sequence[str] = ("page",)
) -> str:
    """The whole page. `title` is text; the other texts are markup. `assets` have its styles and scripts."""
    style, script = ("".join(asset(f"{name}.{kind}") for name in assets) for kind in ("css", "js"))
    return Template(asset("page.html")).substitute(
        title=escape(title),
        policy=f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'",
        style=style,
        script=script,
        headline=headline,
        sections="".join(sections),
        notes=notes,
    )


def section(title: str, content: str, name: str = "") -> str:
    """A section. `title` and `content` are markup. A page with `#name` at the end of its address opens there."""
    named = f' id="{escape(name)}"' if name else ""
    return f"<section{named}><h2>{title}</h2>{content}</section>"


def tiles(facts: dict[str, str]) -> str:
    """Names and values side by side. Both are markup."""
    pairs = (f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    return f'<dl class="tiles">{"".join(pairs)}</dl>'


def asset(name: str) -> str:
    """The text of a file beside this module."""
    return files("nouscoder.report").joinpath(name).read_text(encoding="utf8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf8")).digest()).decode()
