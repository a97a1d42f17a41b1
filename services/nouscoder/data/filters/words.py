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
from collections.abc import Iterable
from typing import Any

# Han, kana, Thai, Lao, Tibetan, Burmese, Khmer.
_NO_SPACES = (
    "\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3041-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff\u0e01-\u0e7f\u0e80-\u0fff\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f\u1780-\u17ff"
)
_MARKS = "\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed\u0900-\u0963\u0966-\u0dff"
_PUNCTUATION = (
    "\"'`´,.;:?!\\\\$#"
    "\u00a1\u00bf\u00ab\u00bb\u2010-\u2015\u2017-\u2027\u2032-\u2051\u2053-\u205e\u2e00-\u2e7f\u3001-\u3004\u3008-\u3020\u30fb"
    "\u0964\u0965•·"
)
_TOKEN = re.compile(
    rf"[{_NO_SPACES}]|\d+\.\d+|(?<![\w.])\.\d+|(?:(?![{_NO_SPACES}])[\w{_MARKS}])+"
    r"|(?<=[\w)])!+|!(?=\w)|(?<=[\w)])'+|(?<=\w)#|:(?==)|(?<=\w)\?(?=\w)|(?:(?<=\d)|(?<=\b\w)):(?=\d|\w\b)"
    rf"|(?<=\s)[,;.?:](?=\s+[^\sA-Z])|[^\w\s{_PUNCTUATION}]"
)
_WORD_BEGIN = re.compile(rf"\.?[\w{_MARKS}{_NO_SPACES}]")
_BRACKETS = "()[]{}"
_RAISED = re.compile("[\u00b2\u00b3\u00b9\u2070-\u207f\u02b0-\u02b8\u02e1-\u02e3\u1d43-\u1d61]+")
_LOWERED = re.compile("[\u2080-\u209c\u1d62-\u1d6a\u2c7c]+")
_BLACKBOARD = "\ue0ff"  # before the letter of a set such as the real numbers
_SAME = str.maketrans(
    {
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212", "-"),
        **dict.fromkeys("×∗⋅·✕✖", "*"),
        **dict.fromkeys("⩽≦", "≤"),
        **dict.fromkeys("⩾≧", "≥"),
        **dict.fromkeys("‘’′", "'"),
        **dict.fromkeys("“”„‟", '"'),
        **{sign: f"{_BLACKBOARD}{letter}" for sign, letter in zip("ℂℍℕℙℚℝℤ", "CHNPQRZ", strict=True)},
        **{sign: f"{unicodedata.normalize('NFKC', sign)} " for sign in "，：；！？"},
        **{sign: f" {sign}" for sign in "¼½¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"},
        **{"÷": "/", "∕": "/", "⁄": "/", "→": "->", "⇒": "=>", "←": "<-", "∣": "|", "~": "∼", "〜": "∼"},
        **dict.fromkeys("\u00ad\u200b\u200c\u200d\u2060\ufe0e\ufe0f\ufeff"),
    }
)
_SPELLED_SIGNS = (
    "le ≤ leq ≤ leqslant ≤ leqq ≤ ge ≥ geq ≥ geqslant ≥ geqq ≥ ne ≠ neq ≠ lt < gt > nleq ≰ ngeq ≱ ll ≪ gg ≫ equiv ≡ "
    "approx ≈ sim ∼ times * cdot * ast * div / pm ± mp ∓ oplus ⊕ otimes ⊗ mid | nmid ∤ parallel ∥ perp ⊥ to -> "
    "rightarrow -> leftarrow <- gets <- Rightarrow => implies => Leftrightarrow ⇔ iff ⇔ leftrightarrow ↔ in ∈ notin "
    "∉ cup ∪ cap ∩ subset ⊂ subseteq ⊆ supset ⊃ supseteq ⊇ emptyset ∅ varnothing ∅ setminus ∖ neg ¬ lnot ¬ land ∧ "
    "wedge ∧ lor ∨ vee ∨ forall ∀ exists ∃ sum ∑ prod ∏ sqrt √ infty ∞ circ ∘ prime ' angle ∠ vert | lvert | rvert "
    "| Vert ‖ lVert ‖ rVert ‖ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ langle ⟨ rangle ⟩ bmod mod pmod mod dfrac \\frac "
    "tfrac \\frac dots ... ldots ... cdots ..."
)
_LAYOUT = "left right big[lrg]? Big[lrg]? quad qquad displaystyle text mathrm mathbf mathit textbf".replace(" ", "|")
_GREEK = [(unicodedata.name(chr(code)).rpartition(" ")[2].lower(), chr(code)) for code in range(0x3B1, 0x3CA)]
_COMMANDS = {
    **dict(re.findall(r"(\S+) (\S+)", _SPELLED_SIGNS)),
    **{spelled: letter for name, letter in _GREEK for spelled in (name, f"var{name}")},
    **{name.title(): letter.upper() for name, letter in _GREEK},
    **{"lambda": "λ", "Lambda": "Λ"},
}
_COMMAND = re.compile(rf"\\({'|'.join(_COMMANDS)})(?![A-Za-z])")
_FONTS = r"text\w*|math(?:rm|bf|it|sf|tt|cal|frak)|emph|operatorname\*?|boldsymbol"
_TAG = r"(?:\s+[\w-]+\s*=\s*(?:\"[^\"<>]*\"|'[^'<>]*'))*\s*/?>"
_AMOUNT = r"\d+(?:[.,]\d+)*"
_DOLLAR = "\ue0fe"
# A dollar sign is of mathematics in a pair, of TeX's or with spaces on both sides; else of money beside an amount.
_DOLLARS = (
    r"\$\$[^$]+\$\$|(?<![\\\d])\$(?=\S)[^$\n]*(?<=[^\s\\])\$(?!\d)|(?<!\S)\$(?=\s)[^$\n]*(?<=\s)\$(?!\w)"
    rf"|(?<=\d)\$(?=[A-Za-z\\({{])[^$\n]*(?<=[^\s\\])\$(?!\d)|\\?\$({_AMOUNT})"
    rf"|(?<!\d)(?<!\d[.,])({_AMOUNT})\\?\$(?=[\s.,;:!?)]|\Z)"
)
_ITEM = re.compile(r"(?m)^[ \t]*[-+]")
_MARKUP = (
    (_DOLLARS, lambda found: f" {_DOLLAR}{found[1] or found[2]} " if found[1] or found[2] else found[0]),
    (rf"(?<!\d)(?<!\d[.,])({_AMOUNT})\s?([€£¥₹₩₽])(?!\w)", r" \2\1"),
    (r"(?<![\w)])\"[^\"\n]*\"|(?<=\d)\"", lambda found: found[0] if len(found[0]) > 1 else "''"),  # inches
    (r"(?m)^[ \t]*(?=\S*[.#])[.#*@]{2,}[ \t]*$", lambda grid: _as_letters(grid[0].strip())),
    (r"(?m)^-{3,}[ \t]*(\w.*?)[ \t]*-{3,}[ \t]*$", r" \1 "),
    (rf"(?i)</?(?:b|i|p|br|em|strong|code|pre|ul|ol|li|div|span|var|tt|h\d){_TAG}", " "),
    (rf"(?i)<(?:(sub)|sup){_TAG}(-?\w+)</su[bp]>", lambda found: f"{'_' if found[1] else '^'}{found[2]} "),
    (r"(?:\A|(?<=\n\n)|(?<=[.:;,!?)]\n))(?:[ \t]*[-+][ \t]+\S.*\n?)+", lambda items: _ITEM.sub("", items[0])),
    (r"(?m)^[ \t]*[*•][ \t]+|^[ \t]*#+[ \t]|^[-=*_|:+ \t]{3,}$", " "),
    (r"(?<![\w*])(\*{1,3})(?![\s*])(.{1,200}?)(?<![\s*])\1(?![\w*])", r"\2"),
    (r"(?<!\w)_(?![\s_])([^_\n]{1,200})(?<!\s)_(?!\w)", r"\1"),
    (rf"\\(?:{_FONTS})\s*\{{([^{{}}]*)\}}", r" \1 "),
    (r"\\mathbb\s*\{?([A-Z])\}?", rf"{_BLACKBOARD}\1"),
    (rf"\\(?:{_LAYOUT})(?![A-Za-z])|\\[()\[\],;: ]", " "),
    (r"\\\|", "‖"),
    (r"\\([_%&#{}])", r"\1"),
)  # fmt: skip
_SPELLINGS = (
    (r"\\not\s*(\S)", "\\1\u0338"),
    (r"([_^√])\{(-?\w+|[^\w\s])\}", r"\1\2 "),
    (r"\^(?:∘|\\degree)", "°"),
    (r"\^'", "'"),
    (r"(?<![\d,.])(\d{1,3})((?:(?:,|\{,\})000)+)(?![\d,])", lambda found: found[1] + re.sub("[^0]", "", found[2])),
    (r"(?<![\w'])'([^'\n]{1,80})'(?!\w)", r'"\1"'),
    (r"([\"`])((?:(?!\1)[^\w\s]){1,3})\1", lambda found: _as_letters(found[2])),
    (r"(?<=\w)\.{2,}(?=\w)", "⋯"),
    (r"\\(?=[A-Za-z](?![A-Za-z]))", "∖"),
    (r"(?<!!)!+(?=\s+[A-Z])", "."),  # no factorial
    (r"(?<=[^\W\d_][^\W\d_])\s*-+\s*(?=[^\W\d_][^\W\d_])", " "),  # a dash or a hyphen of prose
)
_RELATIONS = (("<=", "≤"), (">=", "≥"), ("!=", "≠"), ("<>", "≠"))
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
    text = _COMMAND.sub(lambda command: _COMMANDS[command[1]], _respelled(text, _MARKUP))
    text = html.unescape(text).translate(_SAME)
    for mark, small in (("^", _RAISED), ("_", _LOWERED)):
        text = small.sub(rf"{mark}\g<0> ", text)  # which NFKC makes letters of their size
    text = unicodedata.normalize("NFKC", _respelled(text, _SPELLINGS)).translate(_SAME)
    for spelled, sign in _RELATIONS:
        text = text.replace(spelled, sign)
    return text


def _as_letters(signs: str) -> str:
    return "".join(chr(0xE000 + ord(one) % 0xFF) for one in signs)


def _respelled(text: str, rules: Iterable[tuple[str, Any]]) -> str:
    for pattern, spelling in rules:
        text = re.sub(pattern, spelling, text)
    return text
