"""Which examples supervised fine-tuning trains on, and in which order. All choices depend on the seed only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from math import ceil
from random import Random

from nouscoder.config import SftSection


class Dropped(StrEnum):
    """Why an example is not trained on."""

    REPEATED = "repeated"  # an earlier example has the same tokens
    WRONG = "wrong"
    TOO_LONG = "too_long"
    OVER_LIMIT = "over_limit"  # its problem has enough others
    UNFINISHED = "unfinished"  # its answer was cut off, so it has no end to learn


@dataclass(frozen=True, slots=True)
class ExampleCandidate:
    """What the choice of an example depends on.

    `key` is a digest of its tokens. `problem_id` may be empty: then the example is a problem of its own. `accepted` is
    whether its answer passed all tests; None when nobody has graded it, which counts as right. `text` is the digest of
    its problem's text, empty when that is not known. One without tokens was cut off.
    """

    key: str
    problem_id: str
    accepted: bool | None
    num_tokens: int
    text: str = ""

    @property
    def problem(self) -> str:
        """The problem that it counts for."""
        return self.problem_id or self.key


def choose(
    candidates: Sequence[ExampleCandidate], settings: SftSection, seed: int
) -> tuple[list[int], Counter[Dropped]]:
    """The numbers of the chosen candidates, ascending, and how many others were dropped for each reason.

    Klear-Reasoner (arXiv 2508.07629, section on data quality) finds that wrong answers do harm for easy problems and
    help for hard ones. No example is longer than `settings.max_tokens` (0: any).
    """
    # The share of accepted answers among the graded ones of each problem.
    graded: Counter[str] = Counter(one.problem for one in candidates if one.accepted is not None)
    passed: Counter[str] = Counter(one.problem for one in candidates if one.accepted)
    rates = {problem: passed[problem] / count for problem, count in graded.items()}
    dropped: Counter[Dropped] = Counter()
    of_problem: dict[str, list[int]] = {}
    seen: set[str] = set()
    for number, candidate in enumerate(candidates):
        reason = _fault(candidate, settings, rates, seen)
        if reason is None:
            seen.add(candidate.key)
            of_problem.setdefault(candidate.problem, []).append(number)
        else:
            dropped[reason] += 1
    chosen: list[int] = []
    for numbers in of_problem.values():
        limit = settings.max_per_problem or len(numbers)
        chosen += sorted(numbers, key=lambda number: _digest(f"{seed}/{candidates[number].key}"))[:limit]
        dropped[Dropped.OVER_LIMIT] += max(0, len(numbers) - limit)
    return sorted(chosen), +dropped


def _fault(
    candidate: ExampleCandidate, settings: SftSection, rates: Mapping[str, float], seen: set[str]
) -> Dropped | None:
    if candidate.accepted is False and rates[candidate.problem] >= settings.wrong_below:
        return Dropped.WRONG
    if not candidate.num_tokens:
        return Dropped.UNFINISHED
    if settings.max_tokens and candidate.num_tokens > settings.max_tokens:
        return Dropped.TOO_LONG
    return Dropped.REPEATED if candidate.key in seen else None


def is_held_out(problem: str, share: float) -> bool:
    """Whether the examples of this problem are for validation: by the hash of its name, about `share` of them are."""
    return int.from_bytes(_digest(f"validation/{problem}"), "big") < share * 2**64


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """Each epoch has every example once, in an order of its own. The last batch of an epoch may be smaller."""

    num_examples: int
    batch_size: int
    epochs: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Batches of one epoch."""
        return ceil(self.num_examples / self.batch_size)

    @property
    def num_steps(self) -> int:
        """Batches of all epochs."""
        return self.epochs * self.steps_per_epoch

    def at(self, step: int) -> tuple[int, ...]:
        """The numbers of the examples of the batch after `step` others."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = _shuffled(self.num_examples, self.seed, epoch)
        return order[place * self.batch_size : (place + 1) * self.batch_size]


@lru_cache(maxsize=2)
def _shuffled(num_examples: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(num_examples))
    Random(f"{seed}/epoch/{epoch}").shuffle(order)
    return tuple(order)


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()
