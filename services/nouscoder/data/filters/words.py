"""The words of a prompt, as duplicates and leaks compare them.

Equal are texts that differ in white space, typography (quotes, dashes, full-width forms, LaTeX's or Unicode's signs),
Markdown's marks or punctuation. Texts differ that have other digits, operators, signs, units or symbols, because these
distinguish problems.

A word is a run of letters, digits, marks and underscores, with the operators before it: `a + b` is `a`, `+b`. So n
words are n words, however many operators are between them. In a script without spaces each character is a word.
"""

# ruff: noqa: RUF001

from __future__ import annotations

import html
import re
import unicodedata

# Han, kana, Thai, Lao, Tibetan, Burmese, Khmer.
_NO_SPACES = (
    "\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3041-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff\u0e01-\u0e7f\u0e80-\u0fff\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f\u1780-\u17ff"
)
_MARKS = "\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed\u0900-\u0963\u0966-\u0dff"
_PUNCTUATION = (
    "\"'`´,.;:?!\\\\$#"
    "\u00a1\u00bf\u00ab\u00bb\u2010-\u2027\u2030-\u205e\u2e00-\u2e7f\u3001-\u3004\u3008-\u3020\u30fb\u0964\u0965•·"
)
_TOKEN = re.compile(
    rf"[{_NO_SPACES}]|\d+\.\d+|(?:(?![{_NO_SPACES}])[\w{_MARKS}])+"
    rf"|(?<=\b\w)!|(?<=\))!|(?<=\w)#|[^\w\s{_PUNCTUATION}]"
)
_WORD_BEGIN = re.compile(rf"[\w{_MARKS}{_NO_SPACES}]")
_BRACKETS = "()[]{}"
_RAISED = re.compile("[\u00b2\u00b3\u00b9\u2070-\u207f]+")
_SAME = str.maketrans(
    {
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212", "-"),
        **dict.fromkeys("×∗⋅·✕✖", "*"),
        **dict.fromkeys("⩽≦", "≤"),
        **dict.fromkeys("⩾≧", "≥"),
        **{"÷": "/", "∕": "/", "⁄": "/", "→": "->", "⇒": "=>", "←": "<-", "∣": "|", "~": "∼"},
        **dict.fromkeys("\u00ad\u200b\u200c\u200d\u2060\ufe0e\ufe0f\ufeff"),
    }
)
_COMMANDS = {
    **dict.fromkeys(("le", "leq", "leqslant", "leqq"), "≤"),
    **dict.fromkeys(("ge", "geq", "geqslant", "geqq"), "≥"),
    **dict.fromkeys(("ne", "neq"), "≠"),
    **dict.fromkeys(("times", "cdot", "ast"), "*"),
    **dict.fromkeys(("to", "rightarrow"), "->"),
    **dict.fromkeys(("dfrac", "tfrac"), "\\frac"),
    **dict.fromkeys(("left", "right", "text", "mathrm", "mathbf", "mathit", "textbf", "dots", "ldots", "cdots"), " "),
    **{"lt": "<", "gt": ">", "div": "/", "pm": "±", "mid": "|", "oplus": "⊕", "infty": "∞", "in": "∈", "sim": "∼"},
}
_COMMAND = re.compile(rf"\\({'|'.join(_COMMANDS)})(?![A-Za-z])")
_GROUPED = re.compile(r"([_^])\{(\w+)\}")
_RELATIONS = (("<=", "≤"), (">=", "≥"), ("!=", "≠"), ("<>", "≠"))
_FORMATTING = re.compile(
    r"(?<!\S)\*\*+(?=\S)|(?<=\S)\*\*+(?=[\s,.;:!?)]|$)|-{3,}|={3,}"
    r"|(?<=[^\W\d_][^\W\d_])\s*-+\s*(?=[^\W\d_][^\W\d_])"  # a dash or a hyphen of prose
)
_SENTENCE_END = re.compile(r"!(?=\s+[A-Z])")  # no factorial
_SENTENCE_BEGIN = re.compile(r"(?:^|[.!?:])\W*\w(?=\w)")


def words_of(text: str, *, exact: bool = False) -> list[str]:
    """The words of a text [n]. Their case is folded and brackets do not count, except with `exact`.

    With `exact` only the first letter of a sentence is folded, so that `n` and `N` differ.
    """
    plain = _plain(text)
    plain = _SENTENCE_BEGIN.sub(lambda begin: begin[0].lower(), plain) if exact else plain.casefold()
    words, signs = [], ""
    for found in _TOKEN.finditer(plain):
        token = found[0]
        if _WORD_BEGIN.match(token):
            words.append(signs + token)
            signs = ""
        elif exact or token not in _BRACKETS:
            signs += token
    return [*words, signs] if signs else words


def _plain(text: str) -> str:
    """The text in one spelling of its signs."""
    text = _RAISED.sub(lambda raised: f"^{unicodedata.normalize('NFKC', raised[0])}", html.unescape(text))
    text = unicodedata.normalize("NFKC", text.translate(_SAME)).translate(_SAME)
    text = _GROUPED.sub(r"\1\2", _COMMAND.sub(lambda command: _COMMANDS[command[1]], text))
    for spelled, sign in _RELATIONS:
        text = text.replace(spelled, sign)
    return _FORMATTING.sub(" ", _SENTENCE_END.sub(".", text))
