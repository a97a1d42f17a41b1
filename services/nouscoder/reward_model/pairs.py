"""Preference pairs: which samples are preferred to which, and their files of one JSON record a line.

They are made of the graded samples of an evaluation. AceCoder (arXiv 2502.01718) takes the share of tests that a
program passes as its score s, and prefers program i to program j if s_i > s_j + 0.4, s_i > 0.8 and s_j > 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from pydantic import Field

from nouscoder.atomic_files import write_whole
from nouscoder.data.json_records import checked_records
from nouscoder.domain.signal import SCORE_DIGITS
from nouscoder.errors import Unusable
from nouscoder.evaluation.scored_samples import ScoredProblem
from nouscoder.formats.body import Body


@dataclass(frozen=True, slots=True)
class PairRule:
    """When a sample is preferred to another one, by their scores from 0 to 1. `rejected_above` below 0: always."""

    margin: float = 0.4
    chosen_above: float = 0.8
    rejected_above: float = 0.0

    def holds(self, chosen: float, rejected: float) -> bool:
        """Whether a sample of score `chosen` is preferred to one of score `rejected`."""
        is_better = round(chosen - rejected - self.margin, SCORE_DIGITS) > 0
        return is_better and chosen > self.chosen_above and rejected > self.rejected_above


def preference_pairs(
    scores: Sequence[float], rule: PairRule, at_most: int = 0, seed: str = ""
) -> list[tuple[int, int]]:
    """(place of the chosen, place of the rejected sample) of each pair of one problem's samples, in order.

    With `at_most` only so many of them, chosen by the seed; 0: all.
    """
    places = range(len(scores))
    pairs = [(i, j) for i in places for j in places if rule.holds(scores[i], scores[j])]
    if at_most and len(pairs) > at_most:
        pairs = sorted(Random(seed).sample(pairs, at_most))
    return pairs


class PairBody(Body):
    """One line: the answer `chosen` is better than `rejected`."""

    problem_id: str = Field("", description="the problem's id, if it has one")
    prompt: str = Field(min_length=1, description="what the model was asked")
    chosen: str = Field(description="the better answer")
    rejected: str = Field(description="the worse answer")


@dataclass(frozen=True, slots=True)
class PairCounts:
    """What was made: problems with samples, those with a pair, and pairs."""

    problems: int
    with_pairs: int
    pairs: int

    def text(self, out: Path) -> str:
        """A line for people."""
        return f"{out}: {self.pairs} pairs of {self.with_pairs} of {self.problems} problems"


def write_pairs(problems: Sequence[ScoredProblem], rule: PairRule, at_most: int, seed: int, out: Path) -> PairCounts:
    """Write the pairs of each problem, `at_most` of one, to a file. Raises Unusable."""
    lines: list[str] = []
    with_pairs = 0
    for problem in problems:
        pairs = preference_pairs(problem.scores, rule, at_most, f"{seed}/{problem.problem_id}")
        with_pairs += bool(pairs)
        for chosen, rejected in pairs:
            answers = [problem.samples[at].answer for at in (chosen, rejected)]
            body = PairBody(
                problem_id=problem.problem_id, prompt=problem.prompt, chosen=answers[0], rejected=answers[1]
            )
            lines.append(json.dumps(body.model_dump()) + "\n")
    if not lines:
        raise Unusable(f"no two samples of the {len(problems)} problems differ as {rule} asks")
    write_whole(out, "".join(lines).encode())
    return PairCounts(len(problems), with_pairs, len(lines))


def read_pairs(path: Path) -> list[PairBody]:
    """The pairs of a file. Raises Unusable, BadRecord and UnreadableFile."""
    found = list(checked_records(path, PairBody))
    if not found:
        raise Unusable(f"{path} holds no pair")
    return found
