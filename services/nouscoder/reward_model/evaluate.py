"""What a reward model is worth: best of n on graded samples, and its accuracy on pairs and on RM-Bench.

Means are over problems (or prompts), and each has the standard error of that mean.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import Field

from nouscoder.data.json_records import checked_records
from nouscoder.domain.estimates import best_of_n, correlation, pass_at_k
from nouscoder.errors import Unusable
from nouscoder.evaluation.scored_samples import ScoredProblem, scored_problems
from nouscoder.formats.body import Body
from nouscoder.reward_model.model import AnswerEncoder, load_reward_model, scores_of
from nouscoder.reward_model.pairs import PairBody, read_pairs

# The scores of answers to prompts: (prompt, answer) of each -> score of each.
Scorer = Callable[[Sequence[tuple[str, str]]], list[float]]


class StylesBody(Body):
    """One line of RM-Bench (arXiv 2410.16184): right and wrong answers, each from the plainest style on."""

    id: str | int
    prompt: str
    chosen: list[str] = Field(min_length=2)
    rejected: list[str] = Field(min_length=2)
    domain: str = ""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean with its standard error, that of the mean of `count` independent values."""

    value: float
    standard_error: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """That of these values, at least one. The standard error of one value is not known, and given as 0."""
        mean = math.fsum(values) / len(values)
        if len(values) < 2:
            return cls(mean, 0.0, len(values))
        variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
        return cls(mean, math.sqrt(variance / len(values)), len(values))

    def text(self) -> str:
        """Such as 0.4321 +- 0.0123."""
        return f"{self.value:.4f} +- {self.standard_error:.4f}"


@dataclass(frozen=True, slots=True)
class BestOfN:
    """Best of n by the reward model, beside what bounds it: a random sample (pass@1) and the best choice (pass@n).

    `gain`: best of n less pass@1, paired by problem. `correlation`: of score and rightness over all samples; None
    when all are right or all are wrong.
    """

    n: int
    pass_at_1: Mean
    best_of_n: Mean
    pass_at_n: Mean
    gain: Mean
    correlation: float | None

    def text(self) -> str:
        """A table for people."""
        found = "-" if self.correlation is None else f"{self.correlation:.4f}"
        rows = [
            ("pass@1", self.pass_at_1.text()),
            (f"best of {self.n}", self.best_of_n.text()),
            (f"pass@{self.n}", self.pass_at_n.text()),
            ("gain", self.gain.text()),
            ("correlation", found),
        ]
        return "\n".join(f"{name:<16}{value}" for name, value in rows)


def evaluate_best_of_n(problems: Sequence[ScoredProblem], n: int, scorer: Scorer) -> BestOfN:
    """Best of n on the problems, each with n samples or more. Raises Unusable."""
    short = [problem.problem_id for problem in problems if len(problem.samples) < n]
    if short or not problems:
        raise Unusable(f"{len(short)} problems have fewer than {n} samples, such as {', '.join(short[:3])}")
    asked = [(problem.prompt, sample.answer) for problem in problems for sample in problem.samples]
    scores = scorer(asked)
    right = [[sample.is_right for sample in problem.samples] for problem in problems]
    single, best, bound, at = [], [], [], 0
    for own in right:
        single.append(sum(own) / len(own))
        best.append(best_of_n(scores[at : at + len(own)], own, n))
        bound.append(pass_at_k(len(own), sum(own), n))
        at += len(own)
    return BestOfN(
        n,
        Mean.of(single),
        Mean.of(best),
        Mean.of(bound),
        Mean.of([better - plain for better, plain in zip(best, single, strict=True)]),
        correlation(scores, [float(one) for own in right for one in own]),
    )


def pair_accuracy(pairs: Sequence[PairBody], scorer: Scorer) -> Mean:
    """The share of pairs whose chosen answer has the higher score."""
    scores = scorer([(pair.prompt, answer) for pair in pairs for answer in (pair.chosen, pair.rejected)])
    return Mean.of([float(better > worse) for better, worse in zip(scores[::2], scores[1::2], strict=True)])


@dataclass(frozen=True, slots=True)
class StyleAccuracy:
    """RM-Bench (arXiv 2410.16184): the share of comparisons in which the right answer has the higher score.

    hard: the wrong answer is in a more elaborate style than the right one. normal: both are in the same style. easy:
    the right one is in a more elaborate style.
    """

    hard: float
    normal: float
    easy: float

    @property
    def mean(self) -> float:
        """The mean of the three."""
        return (self.hard + self.normal + self.easy) / 3


def style_accuracy(chosen: Sequence[float], rejected: Sequence[float]) -> StyleAccuracy:
    """The accuracy on one prompt from the scores of right and wrong answers, each from the plainest style on.

    Raises ValueError unless both have the same number of styles, two or more.
    """
    if len(chosen) != len(rejected) or len(chosen) < 2:
        raise ValueError(f"{len(chosen)} right and {len(rejected)} wrong answers: give both in the same styles")
    places = range(len(chosen))
    wins = {(i, j): float(chosen[i] > rejected[j]) for i in places for j in places}
    return StyleAccuracy(
        hard=fmean([won for (i, j), won in wins.items() if i < j]),
        normal=fmean([won for (i, j), won in wins.items() if i == j]),
        easy=fmean([won for (i, j), won in wins.items() if i > j]),
    )


def rm_bench(path: Path, scorer: Scorer) -> dict[str, Mean]:
    """RM-Bench's accuracies by name: hard, normal, easy, their mean, and the mean of each domain.

    Raises Unusable, BadRecord and UnreadableFile.
    """
    records = list(checked_records(path, StylesBody))
    if not records:
        raise Unusable(f"{path} holds no record")
    wrong = next((one.id for one in records if len(one.chosen) != len(one.rejected)), None)
    if wrong is not None:
        raise Unusable(f"{path}: record {wrong} has not as many chosen as rejected answers")
    scores = iter(scorer([(one.prompt, answer) for one in records for answer in (*one.chosen, *one.rejected)]))
    found: dict[str, list[float]] = defaultdict(list)
    for one in records:
        chosen, rejected = ([next(scores) for _ in answers] for answers in (one.chosen, one.rejected))
        accuracy = style_accuracy(chosen, rejected)
        for name, value in (("hard", accuracy.hard), ("normal", accuracy.normal), ("easy", accuracy.easy)):
            found[name].append(value)
        found["mean"].append(accuracy.mean)
        if one.domain:
            found[f"domain {one.domain}"].append(accuracy.mean)
    return {name: Mean.of(values) for name, values in found.items()}


_ROW_TOKENS = 16_384


def scorer_of(folder: Path, max_tokens: int, device: str) -> Scorer:
    """Scores by the reward model in a folder. Raises Unusable."""
    encode = AnswerEncoder(folder, max_tokens)
    model = load_reward_model(folder).to(device)  # type: ignore[arg-type]
    model.train(False)

    def scores(asked: Sequence[tuple[str, str]]) -> list[float]:
        return scores_of(model, [encode(prompt, answer) for prompt, answer in asked], _ROW_TOKENS)

    return scores


def evaluate_reward_model(
    scorer: Scorer,
    *,
    problems: Path | None = None,
    evaluation: Path | None = None,
    n: int = 8,
    pairs: Path | None = None,
    styles: Path | None = None,
) -> tuple[dict[str, Any], str]:
    """(record, text for people) of all that is given. Raises Unusable, and what reading raises."""
    if (problems is None) != (evaluation is None):
        raise Unusable("best of n needs both --problems and --evaluation")
    record: dict[str, Any] = {}
    parts = []
    if problems is not None and evaluation is not None:
        best = evaluate_best_of_n(scored_problems(problems, evaluation), n, scorer)
        record["best_of_n"] = asdict(best)
        parts.append(best.text())
    if pairs is not None:
        accuracy = pair_accuracy(read_pairs(pairs), scorer)
        record["pair_accuracy"] = asdict(accuracy)
        parts.append(f"{'pair accuracy':<16}{accuracy.text()}")
    if styles is not None:
        found = rm_bench(styles, scorer)
        record["rm_bench"] = {name: asdict(mean) for name, mean in found.items()}
        parts.append("\n".join(f"{name:<16}{mean.text()}" for name, mean in found.items()))
    if not parts:
        raise Unusable("give --problems and --evaluation, --pairs, or --rm-bench")
    return record, "\n".join(parts)
