"""Drops duplicates, near-duplicates, and problems that leak an evaluation set.

A leak is the same words, or an n-gram of words in common. Nine words are what Klear-Reasoner (2508.07629) and
AceReason-Nemotron (2505.16400) compare. A hit of two hashes counts only when the words are equal too.

Near-duplicates share most shingles of words. Pairs are found by MinHash signatures and locality-sensitive hashing
(Broder 1997; Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, chapter 3), then judged by their exact Jaccard
similarity. So a dropped problem is always a near-duplicate; one that is as similar as the threshold is missed with a
probability below 0.001.

What a word is says words.py. All hashes have 64 bits and are the same in every process.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from nouscoder.data.filters.step import Candidate, Context, Step, StepOutcome
from nouscoder.data.filters.words import words_of
from nouscoder.data.importers.formats import read_referenced
from nouscoder.data.problem_parquet import is_parquet, read_rows

Hashes = NDArray[np.uint64]

_NUMBER = re.compile(r"\d+")
_BASE = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(31)


def exact_key(text: str) -> bytes:
    """A digest that two texts share when they say the same: the same words, operators and brackets."""
    return hashlib.sha256(" ".join(words_of(text, exact=True)).encode()).digest()[:16]


class NgramHasher:
    """Hashes n-grams of words. The words that it has met are kept with their hashes."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._numbers: dict[str, int] = {}
        self._hashes = np.zeros(1024, np.uint64)  # by the number of the word

    def __call__(self, words: Sequence[str]) -> Hashes:
        """The hash of each n-gram [max(0, len(words) - n + 1)], in the order of the text."""
        for word in set(words) - self._numbers.keys():
            number = self._numbers[word] = len(self._numbers)
            if number == len(self._hashes):
                self._hashes = np.concatenate([self._hashes, np.zeros_like(self._hashes)])
            self._hashes[number] = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
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


def prompts_of(path: Path) -> Iterator[tuple[str, str]]:
    """(problem id, prompt) of each problem of a file. Raises Unusable."""
    if is_parquet(path):
        for row in read_rows(path):
            yield str(row.values["problem_id"]), str(row.values["prompt"])
        return
    for item in read_referenced(path):
        yield item.problem.problem_id, item.problem.prompt


def evaluation_prompts(files: Iterable[str], context: Context) -> Iterator[tuple[str, str]]:
    """(file and problem id, prompt) of each problem of these files. Raises Unusable."""
    for name in files:
        for problem_id, prompt in prompts_of(context.folder / name):
            yield f"{name}: {problem_id}", prompt


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

    def apply(self, candidates: Sequence[Candidate], context: Context) -> StepOutcome:
        index = NearIndex(self.threshold, self.shingle)
        for label, prompt in evaluation_prompts(self.against, context):
            index.add(label, prompt)
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
        found = None if marks is None else self._nearest(marks)
        if marks is None or found is not None:
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
        # The minimum of each of the random linear maps modulo 2^64 [bands * rows].
        values = self._factors * shingles
        values += self._terms
        signature: Hashes = values.min(axis=1)
        keys = [(band, signature[band * self._rows : (band + 1) * self._rows].tobytes()) for band in range(_BANDS)]
        return _Marks(shingles, signature, keys)

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


class ExactDuplicates(Step):
    """Drops a problem whose prompt says the same as that of an earlier one."""

    filter: Literal["exact_duplicates"]

    def apply(self, candidates: Sequence[Candidate], context: Context) -> StepOutcome:
        """See Step."""
        first: dict[bytes, str] = {}
        dropped = {}
        for one in candidates:
            earlier = first.setdefault(exact_key(one.prompt), one.problem_id)
            if earlier != one.problem_id:
                dropped[one.problem_id] = f"duplicate: of {earlier}"
        return StepOutcome(dropped)


class Decontaminate(Step):
    """Drops problems whose prompt is in an evaluation set, or shares `ngram` words in a row with one of its prompts."""

    filter: Literal["decontaminate"]
    against: list[str] = Field(min_length=1, description="problem files of the evaluation sets")
    ngram: int = Field(9, ge=0, description="words in a row; 0: only equal prompts are dropped")
    boilerplate: int = Field(
        0,
        ge=0,
        description="phrases of ngram / 2 words that more than this many problems have, of both sides, are common, as"
        " `the first line of the input`; an n-gram that begins or ends with one is no leak; 0: all n-grams count",
    )

    def apply(self, candidates: Sequence[Candidate], context: Context) -> StepOutcome:
        known = _EvaluationSets(self.ngram)
        for name, prompt in evaluation_prompts(self.against, context):
            known.add(name, prompt)
        if self.boilerplate:
            known.leave_out_phrases((one.prompt for one in candidates), self.boilerplate)
        dropped = {}
        for one in candidates:
            label = known.equal(one.prompt)
            if label is not None:
                dropped[one.problem_id] = f"equal prompt: {label}"
            elif shared := known.shared(words_of(one.prompt)):
                dropped[one.problem_id] = f"{self.ngram} equal words: {shared}"
        return StepOutcome(dropped)


class _EvaluationSets:
    """The prompts of all evaluation sets, found by their words and by their n-grams."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._hasher = NgramHasher(n)
        self._labels: list[str] = []
        self._words: list[list[str]] = []
        self._equal: dict[bytes, str] = {}
        self._places: dict[int, tuple[int, int]] = {}  # of an n-gram: its prompt's number, the place of its first word

    def add(self, label: str, prompt: str) -> None:
        self._equal.setdefault(exact_key(prompt), label)
        if not self._n:
            return
        words = words_of(prompt)
        for at, key in enumerate(self._hasher(words).tolist()):
            self._places.setdefault(key, (len(self._words), at))
        self._labels.append(label)
        self._words.append(words)

    def leave_out_phrases(self, prompts: Iterable[str], most: int) -> None:
        """Forget the n-grams that begin or end with a phrase that more than `most` of these and own prompts have.

        Any number may stand for another in a phrase: bounds such as `1 <= t <= 100` are of one form in all problems.
        """
        length = (self._n + 1) // 2
        hasher = NgramHasher(length)

        def phrases_of(words: Sequence[str]) -> list[int]:
            found: list[int] = hasher([_NUMBER.sub("0", word) for word in words]).tolist()
            return found

        phrases = [phrases_of(words) for words in self._words]
        having = Counter(key for each in phrases for key in set(each))
        for prompt in prompts:
            having.update(having.keys() & phrases_of(words_of(prompt)))
        common = {key for key, count in having.items() if count > most}
        self._places = {
            key: (prompt, at)
            for key, (prompt, at) in self._places.items()
            if phrases[prompt][at] not in common and phrases[prompt][at + self._n - length] not in common
        }

    def equal(self, prompt: str) -> str | None:
        """The evaluation problem that says the same."""
        return self._equal.get(exact_key(prompt)) if prompt.strip() else None

    def shared(self, words: Sequence[str]) -> str:
        """The first n-gram in common and its evaluation problem; empty when there is none."""
        for at, key in enumerate(self._hasher(words).tolist() if self._places else ()):
            if key in self._places:
                prompt, place = self._places[key]
                ngram = self._words[prompt][place : place + self._n]
                if ngram == list(words[at : at + self._n]):
                    return f"{self._labels[prompt]} has {' '.join(ngram)!r:.160}"
        return ""
