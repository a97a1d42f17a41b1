"""What `nouscoder reward-model eval` does: load a model and measure it on what is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nouscoder.evaluation.scored_samples import scored_problems
from nouscoder.reward_model.evaluate import NothingToScore, Scorer, evaluate_best_of_n, pair_accuracy, rm_bench
from nouscoder.reward_model.model import AnswerEncoder, load_reward_model, scores_of
from nouscoder.reward_model.pairs import read_pairs

_ROW_TOKENS = 16_384


def scorer_of(folder: Path, max_tokens: int, device: str) -> Scorer:
    """Scores by the reward model in a folder. Raises RewardModelUnusable."""
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
    """(record, text for people) of all that is given: an evaluation's samples, pairs, and RM-Bench's file.

    Raises NothingToScore, and what reading raises.
    """
    if (problems is None) != (evaluation is None):
        raise NothingToScore("best of n needs both --problems and --evaluation")
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
        raise NothingToScore("give --problems and --evaluation, --pairs, or --rm-bench")
    return record, "\n".join(parts)
