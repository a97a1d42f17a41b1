"""Escapes text for the page. Programs are model output and may be hostile.

INVARIANT: the result of `escape` cannot open or close an element or an attribute, or change the direction of the text
around it.
"""

from __future__ import annotations

import html
import unicodedata

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
