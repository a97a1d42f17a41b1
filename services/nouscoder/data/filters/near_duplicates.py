"""Drops near-duplicates: problems whose prompts share most of their shingles of words.

Pairs are found by MinHash signatures and locality-sensitive hashing (Broder 1997; Leskovec, Rajaraman and Ullman,
Mining of Massive Datasets, chapter 3), then judged by their exact Jaccard similarity. So a dropped problem is always
a near-duplicate; one that is as similar as the threshold is missed with a probability below 0.001.

Texts are compared as words and as hashes of their n-grams. A word is a run of letters, digits and underscores, in lower
case. So texts are equal that differ in case, white space or punctuation only. All hashes have 64 bits and are the same
in every process.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from nouscoder.data.filters.step import Candidate, Context, Step, StepOutcome
from nouscoder.data.importers.formats import read_referenced
from nouscoder.data.problem_parquet import is_parquet, read_rows

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


_BANDS = 32
_MISSED = 1e-3
_SEED = 20250801
_ESTIMATE_SLACK = 0.2  # more than three standard deviations of an estimate from 64 values


class NearDuplicates(Step):
    """Drops a problem whose prompt is nearly that of an earlier one that is kept, or of an evaluation problem."""

    filter: Literal["near_duplicates"]
    threshold: float = Field(0.8, ge=0.3, le=1, description="Jaccard similarity from which two prompts are near")
    shingle: int = Field(5, ge=1, description="words in a row that are compared")
    against: list[str] = Field([], description="problem files of evaluation sets")

    def files(self) -> tuple[str, ...]:
        """See Step."""
        return tuple(self.against)

    def apply(self, candidates: Sequence[Candidate], context: Context) -> StepOutcome:
        """See Step."""
        index = NearIndex(self.threshold, self.shingle)
        for name in self.against:
            for problem_id, prompt in prompts_of(context.folder / name):
                index.add(f"{name}: {problem_id}", prompt)
        dropped = {}
        for one in candidates:
            found = index.add(one.problem_id, one.prompt)
            if found is not None:
                dropped[one.problem_id] = f"near-duplicate: of {found[0]}, similarity {found[1]:.3f}"
        return StepOutcome(dropped)


def rows_per_band(threshold: float) -> int:
    """The most values in a band with which a pair at the threshold is missed with probability (1 - t^r)^b <= 0.001."""
    rows = 1
    while rows < 8 and (1 - threshold ** (rows + 1)) ** _BANDS <= _MISSED:
        rows += 1
    return rows


@dataclass(frozen=True, slots=True)
class _Marks:
    """What is compared of a text. `keys` are its buckets, one for each band."""

    shingles: Hashes
    signature: Hashes
    keys: list[tuple[int, bytes]]


class NearIndex:
    """The texts that were added and are no near-duplicates of earlier ones."""

    def __init__(self, threshold: float, shingle: int) -> None:
        self._threshold = threshold
        self._shingles = NgramHasher(shingle)
        self._rows = rows_per_band(threshold)
        random = np.random.Generator(np.random.PCG64(_SEED))
        size = (_BANDS * self._rows, 1)
        self._factors = random.integers(0, 2**63, size, np.uint64) * np.uint64(2) + np.uint64(1)
        self._terms = random.integers(0, 2**63, size, np.uint64)
        self._names: list[str] = []
        self._sets: list[Hashes] = []
        self._signatures: list[Hashes] = []
        self._buckets: dict[tuple[int, bytes], list[int]] = defaultdict(list)

    def add(self, name: str, text: str) -> tuple[str, float] | None:
        """(name, similarity) of an earlier text that this one is near to; None: there is none, and it is added.

        A text without words is near to nothing.
        """
        marks = self._marks(text)
        if marks is None:
            return None
        found = self._nearest(marks)
        if found is not None:
            return found
        for key in marks.keys:
            self._buckets[key].append(len(self._names))
        self._names.append(name)
        self._sets.append(marks.shingles)
        self._signatures.append(marks.signature)
        return None

    def find(self, text: str) -> tuple[str, float] | None:
        """What `add` answers; nothing is added."""
        marks = self._marks(text)
        return None if marks is None else self._nearest(marks)

    def _marks(self, text: str) -> _Marks | None:
        """None for a text without words."""
        words = words_of(text)
        if not words:
            return None
        # A text shorter than a shingle is filled up to one shingle.
        short = [*words, *([""] * (self._shingles.n - len(words)))]
        shingles = np.unique(self._shingles(short))
        signature = self._signature(shingles)
        keys = [(band, signature[band * self._rows : (band + 1) * self._rows].tobytes()) for band in range(_BANDS)]
        return _Marks(shingles, signature, keys)

    def _signature(self, shingles: Hashes) -> Hashes:
        """The minimum of each of the random linear maps modulo 2^64 [bands * rows]."""
        values = self._factors * shingles
        values += self._terms
        minimum: Hashes = values.min(axis=1)
        return minimum

    def _nearest(self, marks: _Marks) -> tuple[str, float] | None:
        best: tuple[str, float] | None = None
        for at in sorted({at for key in marks.keys for at in self._buckets.get(key, ())}):
            estimate = float(np.mean(self._signatures[at] == marks.signature))
            if estimate < self._threshold - _ESTIMATE_SLACK:
                continue
            similarity = jaccard(marks.shingles, self._sets[at])
            if similarity >= self._threshold and (best is None or similarity > best[1]):
                best = (self._names[at], similarity)
        return best


def jaccard(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> float:
    """|A and B| / |A or B| of two sorted arrays without repetitions, of which one is not empty."""
    common = len(np.intersect1d(one, other, assume_unique=True))
    return common / (len(one) + len(other) - common)
