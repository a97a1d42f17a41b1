"""Reads examples from files and run folders, encodes them, and chooses those that are trained on.

A file is JSON lines, a JSON array or parquet. A run folder gives the rollouts of its saved batches,
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
from nouscoder.domain.verdict import VerdictKind
from nouscoder.errors import Unusable
from nouscoder.learner.state.saved_batches import SavedBatches
from nouscoder.sft.choice import ExampleCandidate, choose, is_held_out
from nouscoder.sft.encoder import Encoder
from nouscoder.sft.records import BadExample, example_of, without_nulls
from nouscoder.sft.rollouts import again

_BATCHES = "batches"
_ALL = 99  # levels of a record


class ExamplesUnusable(Unusable):
    """A file holds no usable examples. The message names the file, the record and the fault."""


@dataclass(frozen=True, slots=True)
class Examples:
    """The examples. `dropped` counts others by reason; `problems` are those of `train`, with digests of their texts."""

    train: tuple[Rollout, ...]
    validation: tuple[Rollout, ...] = ()
    dropped: dict[str, int] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

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
    settings = settings.model_copy(update={"max_tokens": settings.max_tokens or context_tokens or 0})
    rollouts, candidates = _read(settings.train, encoder, vocabulary_size)
    numbers, dropped = choose(candidates, settings, seed)
    held_out = {number for number in numbers if is_held_out(candidates[number].problem, settings.validation_share)}
    train = tuple(rollouts[number] for number in numbers if number not in held_out)
    validation = tuple(rollouts[number] for number in sorted(held_out))
    if settings.validation:
        others, theirs = _read(settings.validation, encoder, vocabulary_size)
        validation = tuple(others[number] for number in choose(theirs, settings, seed)[0])
    if not train:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "there is none"
        raise ExamplesUnusable(f"sft.train: no example is left to train on ({reasons})")
    problems = {candidates[number].problem: candidates[number].text for number in numbers if number not in held_out}
    return Examples(train, validation, {reason.value: count for reason, count in dropped.items()}, problems)


# An example, None for one that cannot be taught, and what its choice depends on.
_Read = tuple[Rollout | None, ExampleCandidate]


def _read(
    paths: Sequence[Path], encoder: Encoder, vocabulary_size: int
) -> tuple[dict[int, Rollout], list[ExampleCandidate]]:
    rollouts: dict[int, Rollout] = {}
    candidates: list[ExampleCandidate] = []
    for path in paths:
        for rollout, candidate in _from_run(path, vocabulary_size) if path.is_dir() else _from_file(path, encoder):
            if rollout is not None:
                rollouts[len(candidates)] = rollout
            candidates.append(candidate)
    return rollouts, candidates


def _from_file(path: Path, encoder: Encoder) -> Iterator[_Read]:
    for row in file_rows(path, 0):
        try:
            if row.fault:
                raise BadExample(row.fault)
            example = example_of(without_nulls(row.value, _ALL) if path.suffix == ".parquet" else row.value)
            record = example.record
            for rollout in [None] if example.is_unfinished else encoder.encode_all(example):
                yield _candidate(rollout, record.problem_id, example.accepted, record.text_digest)
        except BadExample as error:
            raise ExamplesUnusable(f"{path}, record {row.number}: {error}") from None


def _candidate(rollout: Rollout | None, problem_id: str, accepted: bool | None, text: str = "") -> _Read:
    key, size = (key_of(rollout), len(rollout.token_ids)) if rollout is not None else ("", 0)
    return rollout, ExampleCandidate(key, problem_id, accepted, size, text)


def _from_run(path: Path, vocabulary_size: int) -> Iterator[_Read]:
    saved = SavedBatches(path / _BATCHES, 1)
    if not saved.numbers():
        raise ExamplesUnusable(f"{path} is not a run folder with saved batches: it has no {_BATCHES}/*.batch")
    for number in saved.numbers():
        for graded in saved.load(number).rollouts:
            if max(graded.rollout.token_ids) >= vocabulary_size:
                raise ExamplesUnusable(f"{path} is a run of a policy with another vocabulary than the one to train")
            rollout, is_right = again(graded.rollout), graded.verdict.kind is VerdictKind.ACCEPTED
            yield _candidate(rollout, rollout.problem_id, is_right)


def key_of(rollout: Rollout) -> str:
    """A digest of the tokens and segments of an example."""
    segments = ",".join(f"{segment.num_tokens}{'+' if segment.is_sampled else '-'}" for segment in rollout.segments)
    return hashlib.sha256(segments.encode() + b"/" + rollout.token_ids.cast("B")).hexdigest()
