"""Families that read a word or a line of words."""

from __future__ import annotations

from nouscoder.demo.family import Family, Parameters
from nouscoder.demo.spaces import (
    LETTER_PAIRS,
    LETTERS,
    NUMBERS,
    WORD_SPACE,
    number,
    sentences,
    singles,
    word_lines,
)

_READ = "s=input()\n"
_WORDS = "w=input().split()\n"
_CUTS = singles(range(2, 40))


def _n(parameters: Parameters) -> int:
    return number(parameters[0])


def _yes(condition: bool) -> str:
    return "yes" if condition else "no"


def _swap(text: str, old: str, new: str) -> str:
    return "".join(new if letter == old else letter for letter in text)


STRINGS = (
    Family("repeat", NUMBERS, "Read a word. Print it {a} times.", _READ + "print(s*{a})",
           (_READ + "print(s+{a})", _READ + "print(s*2*{a})"), word_lines(1, 6),
           lambda t, p: "".join(t.strip() for _ in range(_n(p)))),
    Family("count_letter", LETTERS, "Read a word. Count the letter '{a}'.", _READ + "print(s.count('{a}'))",
           (_READ + "print(s.find('{a}'))", _READ + "print(len('{a}'))"), word_lines(2, 9),
           lambda t, p: str(sum(letter == p[0] for letter in t))),
    Family("replace", LETTER_PAIRS, "Read a word. Turn every '{a}' into '{b}'.",
           _READ + "print(s.replace('{a}','{b}'))",
           (_READ + "print(s.replace('{b}','{a}'))", _READ + "print(s)"), word_lines(2, 9),
           lambda t, p: _swap(t.strip(), str(p[0]), str(p[1]))),
    Family("remove", LETTERS, "Read a word. Print it without the letter '{a}'.", _READ + "print(s.replace('{a}',''))",
           (_READ + "print(s.count('{a}'))", _READ + "print(s)"), word_lines(3, 9),
           lambda t, p: "".join(letter for letter in t.strip() if letter != p[0])),
    Family("first_letters", _CUTS, "Read a word. Print its first {a} letters.", _READ + "print(s[:{a}])",
           (_READ + "print(s[{a}:])", _READ + "print(s[{a}])"), word_lines(41, 44), lambda t, p: t[: _n(p)]),
    Family("last_letters", _CUTS, "Read a word. Print its last {a} letters.", _READ + "print(s[-{a}:])",
           (_READ + "print(s[{a}:])", _READ + "print(s[-{a}])"), word_lines(41, 44),
           lambda t, p: t.strip()[len(t.strip()) - _n(p) :]),
    Family("drop_letters", _CUTS, "Read a word. Drop its first {a} letters.", _READ + "print(s[{a}:])",
           (_READ + "print(s[:{a}])", _READ + "print(s[-{a}:])"), word_lines(41, 44), lambda t, p: t.strip()[_n(p) :]),
    Family("append", WORD_SPACE, "Read a word. Print it and then '{a}'.", _READ + "print(s+'{a}')",
           (_READ + "print('{a}'+s)", _READ + "print(s,'{a}')"), word_lines(2, 7), lambda t, p: f"{t.strip()}{p[0]}"),
    Family("prepend", WORD_SPACE, "Read a word. Print '{a}' and then it.", _READ + "print('{a}'+s)",
           (_READ + "print(s+'{a}')", _READ + "print('{a}',s)"), word_lines(2, 7), lambda t, p: f"{p[0]}{t.strip()}"),
    Family("contains", LETTERS, "Read a word. Print yes if it has the letter '{a}', else no.",
           _READ + "print('yes' if '{a}' in s else 'no')",
           (_READ + "print('no' if '{a}' in s else 'yes')", _READ + "print('{a}' in s)"), word_lines(2, 9),
           lambda t, p: _yes(t.count(str(p[0])) > 0)),
    Family("starts_with", LETTERS, "Read a word. Print yes if it starts with '{a}', else no.",
           _READ + "print('yes' if s[0]=='{a}' else 'no')",
           (_READ + "print('yes' if s[1]=='{a}' else 'no')", _READ + "print('yes' if s=='{a}' else 'no')"),
           word_lines(2, 6), lambda t, p: _yes(t.startswith(str(p[0])))),
    Family("length_plus", NUMBERS, "Read a word. Print its length plus {a}.", _READ + "print(len(s)+{a})",
           (_READ + "print(len(s))", _READ + "print(len(s)-{a})"), word_lines(1, 16),
           lambda t, p: str(sum(1 for _ in t.strip()) + _n(p))),
    Family("capitals", WORD_SPACE, "Read a word. Print it in capitals, then '{a}'.", _READ + "print(s.upper()+'{a}')",
           (_READ + "print(s+'{a}')", _READ + "print(s.lower()+'{a}')"), word_lines(2, 7),
           lambda t, p: "".join(chr(ord(letter) - 32) for letter in t.strip()) + str(p[0])),
    Family("backwards", LETTERS, "Read a word. Print it backwards, then '{a}'.", _READ + "print(s[::-1]+'{a}')",
           (_READ + "print(s[-1]+'{a}')", _READ + "print(s+'{a}')"), word_lines(3, 8),
           lambda t, p: "".join(reversed(t.strip())) + str(p[0])),
    Family("find_letter", LETTERS, "Read a word. Print where '{a}' is first, or -1.", _READ + "print(s.find('{a}'))",
           (_READ + "print(s.count('{a}'))", _READ + "print(s.index('{a}'))"), word_lines(3, 9),
           lambda t, p: str(next((i for i, letter in enumerate(t) if letter == p[0]), -1))),
    Family("join", LETTERS, "Read words. Join them with '{a}'.", _WORDS + "print('{a}'.join(w))",
           (_WORDS + "print(''.join(w))", _WORDS + "print('{a}',w)"), sentences(2, 5),
           lambda t, p: t.strip().replace(" ", str(p[0]))),
    Family("count_word", WORD_SPACE, "Read words. Count the word '{a}'.", _WORDS + "print(w.count('{a}'))",
           (_WORDS + "print(w.index('{a}'))", _WORDS + "print(len('{a}'))"), sentences(2, 5),
           lambda t, p: str(sum(word == p[0] for word in t.split()))),
    Family("word_lengths", NUMBERS, "Read words. Print each length plus {a}.",
           _WORDS + "for x in w:\n print(len(x)+{a})",
           (_WORDS + "for x in w:\n print(len(w)+{a})", _WORDS + "for x in w:\n print(len(x)-{a})"), sentences(4, 7),
           lambda t, p: "\n".join(str(len(word) + _n(p)) for word in t.split())),
)  # fmt: skip
