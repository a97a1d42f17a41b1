"""Reads examples from files and run folders, encodes them, and chooses those that are trained on.

A file is JSON lines, a JSON array or parquet (examples.py). A run folder gives the rollouts of its saved batches,
token by token as they were sampled, with their verdicts; learner.keep_batches says how many batches a run keeps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nouscoder.config import SftSection
from nouscoder.data.importers.rows import file_rows
from nouscoder.domain.rollout import Rollout
from nouscoder.domain.supervised import Candidate, ChoiceRules, choose, is_held_out
from nouscoder.domain.verdict import VerdictKind
from nouscoder.errors import Unusable
from nouscoder.learner.saved_batches import SavedBatches
from nouscoder.sft.encoding import Encoder
from nouscoder.sft.examples import BadExample, example_of
from nouscoder.sft.rollouts import again

_BATCHES = "batches"


class ExamplesUnusable(Unusable):
    """A file holds no usable examples. The message names the file, the record and the fault."""


@dataclass(frozen=True, slots=True)
class Examples:
    """The examples of a fine-tuning. `dropped` counts those that were not chosen, by reason."""

    train: tuple[Rollout, ...]
    validation: tuple[Rollout, ...] = ()
    dropped: dict[str, int] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """The SHA-256 of all their tokens, in order: equal digests give equal trainings."""
        whole = hashlib.sha256()
        for part in (self.train, self.validation):
            whole.update(len(part).to_bytes(8, "little"))
            for rollout in part:
                whole.update(bytes.fromhex(key_of(rollout)))
        return whole.hexdigest()


def read_examples(
    settings: SftSection, encoder: Encoder, vocabulary_size: int, context_tokens: int | None, seed: int
) -> Examples:
    """All examples of the section, encoded and chosen. Raises ExamplesUnusable and what reading raises."""
    rules = settings.record(ChoiceRules, max_tokens=settings.max_tokens or context_tokens or 0)
    rollouts, candidates = _read(settings.train, encoder, vocabulary_size)
    numbers, dropped = choose(candidates, rules, seed)
    held_out = {number for number in numbers if is_held_out(candidates[number].problem, settings.validation_share)}
    train = tuple(rollouts[number] for number in numbers if number not in held_out)
    validation = tuple(rollouts[number] for number in sorted(held_out))
    if settings.validation:
        others, theirs = _read(settings.validation, encoder, vocabulary_size)
        validation = tuple(others[number] for number in choose(theirs, rules, seed)[0])
    if not train:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "there is none"
        raise ExamplesUnusable(f"sft.train: no example is left to train on ({reasons})")
    return Examples(train, validation, {reason.value: count for reason, count in dropped.items()})


def _read(paths: Sequence[Path], encoder: Encoder, vocabulary_size: int) -> tuple[list[Rollout], list[Candidate]]:
    rollouts: list[Rollout] = []
    candidates: list[Candidate] = []
    for path in paths:
        for rollout, accepted in _from_run(path, vocabulary_size) if path.is_dir() else _from_file(path, encoder):
            rollouts.append(rollout)
            size = len(rollout.token_ids)
            candidates.append(Candidate(key_of(rollout), rollout.problem_id, accepted, size))
    return rollouts, candidates


def _from_file(path: Path, encoder: Encoder) -> Iterator[tuple[Rollout, bool | None]]:
    for row in file_rows(path, 0):
        try:
            if row.fault:
                raise BadExample(row.fault)
            example = example_of(row.value)
            yield encoder.encode(example), example.accepted
        except BadExample as error:
            raise ExamplesUnusable(f"{path}, record {row.number}: {error}") from None


def _from_run(path: Path, vocabulary_size: int) -> Iterator[tuple[Rollout, bool | None]]:
    saved = SavedBatches(path / _BATCHES, 1)
    if not saved.numbers():
        raise ExamplesUnusable(f"{path} is not a run folder with saved batches: it has no {_BATCHES}/*.batch")
    for number in saved.numbers():
        for graded in saved.load(number).rollouts:
            if max(graded.rollout.token_ids) >= vocabulary_size:
                raise ExamplesUnusable(f"{path} is a run of a policy with another vocabulary than the one to train")
            yield again(graded.rollout), graded.verdict.kind is VerdictKind.ACCEPTED


def key_of(rollout: Rollout) -> str:
    """A digest of the tokens and segments of an example."""
    segments = ",".join(f"{segment.num_tokens}{'+' if segment.is_sampled else '-'}" for segment in rollout.segments)
    return hashlib.sha256(segments.encode() + b"/" + rollout.token_ids.cast("B")).hexdigest()
