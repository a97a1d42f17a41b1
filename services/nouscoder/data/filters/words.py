"""Texts as words and as hashes of their n-grams, for decontamination and for near-duplicates.

A word is a run of letters, digits and underscores, in lower case. So texts are equal that differ in case, white space
or punctuation only. All hashes have 64 bits and are the same in every process.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nouscoder.data.problem_parquet import is_parquet, read_rows
from nouscoder.data.reading import read_referenced

Hashes = NDArray[np.uint64]

_WORD = re.compile(r"\w+")
_BASE = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(31)


def words_of(text: str) -> list[str]:
    """The words of a text [n]."""
    return _WORD.findall(text.lower())


def exact_key(words: Sequence[str]) -> bytes:
    """A digest that two texts share when their words are equal."""
    return hashlib.sha256(" ".join(words).encode()).digest()[:16]


class NgramHasher:
    """Hashes n-grams of words. The words that it has met are kept with their hashes."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._numbers: dict[str, int] = {}
        self._hashes = np.zeros(1024, np.uint64)  # by the number of the word

    def __call__(self, words: Sequence[str]) -> Hashes:
        """The hash of each n-gram [max(0, len(words) - n + 1)], in the order of the text."""
        self._meet(set(words) - self._numbers.keys())
        count = len(words) - self.n + 1
        if count <= 0:
            return np.zeros(0, np.uint64)
        each = self._hashes[np.fromiter(map(self._numbers.__getitem__, words), np.int64, len(words))]
        found = np.zeros(count, np.uint64)
        for at in range(self.n):  # a polynomial of the words' hashes, modulo 2^64
            found = found * _BASE + each[at : at + count]
        found ^= found >> _SHIFT
        found *= _MIX
        mixed: Hashes = found ^ (found >> _SHIFT)
        return mixed

    def _meet(self, words: set[str]) -> None:
        for word in words:
            number = self._numbers[word] = len(self._numbers)
            if number == len(self._hashes):
                self._hashes = np.concatenate([self._hashes, np.zeros_like(self._hashes)])
            self._hashes[number] = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def prompts_of(path: Path) -> Iterator[tuple[str, str]]:
    """(problem id, prompt) of each problem of a file. Raises Unusable."""
    if is_parquet(path):
        for row in read_rows(path):
            yield str(row.values["problem_id"]), str(row.values["prompt"])
        return
    for item in read_referenced(path):
        yield item.problem.problem_id, item.problem.prompt
