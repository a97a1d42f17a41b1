"""Drops problems that leak an evaluation set: the same words, or an n-gram of words in common.

Nine words are what Klear-Reasoner (2508.07629) and AceReason-Nemotron (2505.16400) compare. A hit of two hashes counts
only when the words are equal too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from nouscoder.data.filters.near_duplicates import NgramHasher, exact_key, prompts_of, words_of
from nouscoder.data.filters.step import Candidate, Context, Step, StepOutcome


class ExactDuplicates(Step):
    """Drops a problem whose prompt has the same words as that of an earlier one."""

    filter: Literal["exact_duplicates"]

    def apply(self, candidates: Sequence[Candidate], context: Context) -> StepOutcome:
        """See Step."""
        first: dict[bytes, str] = {}
        dropped = {}
        for one in candidates:
            earlier = first.setdefault(exact_key(words_of(one.prompt)), one.problem_id)
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
        description="phrases of ngram / 2 words that more than this many problems have are common, as `the first line"
        " of the input`; an n-gram that begins or ends with one is no leak; 0: all n-grams count",
    )

    def files(self) -> tuple[str, ...]:
        """See Step."""
        return tuple(self.against)

    def apply(self, candidates: Sequence[Candidate], context: Context) -> StepOutcome:
        """See Step."""
        known = _EvaluationSets(self.ngram)
        for name in self.against:
            for problem_id, prompt in prompts_of(context.folder / name):
                known.add(f"{name}: {problem_id}", prompt)
        if self.boilerplate:
            known.leave_out_phrases((one.prompt for one in candidates), self.boilerplate)
        dropped = {}
        for one in candidates:
            words = words_of(one.prompt)
            label = known.equal(words)
            if label is not None:
                dropped[one.problem_id] = f"equal prompt: {label}"
            elif shared := known.shared(words):
                dropped[one.problem_id] = f"{self.ngram} equal words: {shared}"
        return StepOutcome(dropped)


@dataclass(frozen=True, slots=True)
class _Place:
    """An n-gram of an evaluation prompt: the prompt's number and the place of its first word."""

    prompt: int
    at: int


class _EvaluationSets:
    """The prompts of all evaluation sets, found by their words and by their n-grams."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._hasher = NgramHasher(n)
        self._labels: list[str] = []
        self._words: list[list[str]] = []
        self._equal: dict[bytes, str] = {}
        self._places: dict[int, _Place] = {}

    def add(self, label: str, prompt: str) -> None:
        words = words_of(prompt)
        self._equal.setdefault(exact_key(words), label)
        if not self._n:
            return
        for at, key in enumerate(self._hasher(words).tolist()):
            self._places.setdefault(key, _Place(len(self._words), at))
        self._labels.append(label)
        self._words.append(words)

    def leave_out_phrases(self, prompts: Iterable[str], most: int) -> None:
        """Forget the n-grams that begin or end with a phrase that more than `most` of these prompts have."""
        length = (self._n + 1) // 2
        hasher = NgramHasher(length)
        phrases = [hasher(words).tolist() for words in self._words]
        own = {key for each in phrases for key in each}
        having = Counter(key for prompt in prompts for key in own.intersection(hasher(words_of(prompt)).tolist()))
        common = {key for key, count in having.items() if count > most}
        self._places = {
            key: place
            for key, place in self._places.items()
            if phrases[place.prompt][place.at] not in common
            and phrases[place.prompt][place.at + self._n - length] not in common
        }

    def equal(self, words: Sequence[str]) -> str | None:
        """The evaluation problem that has these words."""
        return self._equal.get(exact_key(words)) if words else None

    def shared(self, words: Sequence[str]) -> str:
        """The first n-gram in common and its evaluation problem; empty when there is none."""
        if not self._places:
            return ""
        for at, key in enumerate(self._hasher(words).tolist()):
            place = self._places.get(key)
            if place is None:
                continue
            ngram = self._words[place.prompt][place.at : place.at + self._n]
            if ngram == list(words[at : at + self._n]):
                return f"{self._labels[place.prompt]} has {' '.join(ngram)!r:.160}"
        return ""
