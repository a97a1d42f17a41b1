"""Guards: signs that a policy collapses or that rewards are hacked; and whether the reward rises during a training.

INVARIANT: warnings depend only on the figures of batches and on texts: nothing here reads a clock, a file or a random
number.

The reward trend compares the last third of a training's batches with the first third. For each problem that both thirds
have: the mean reward of its rollouts in the last third minus that in the first. The gain is the mean of these
differences over problems, with a bootstrap interval over problems (estimates.py). A problem is compared only with
itself, so it does not matter which problems a batch has, or how hard they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from nouscoder.domain.estimates import bootstrap_interval


class Guard(StrEnum):
    """What a guard warns of."""

    ENTROPY_FLOOR = "entropy_floor"
    REPETITION = "repetition"
    LENGTH_DRIFT = "length_drift"
    HARD_CODING = "hard_coding"
    SAME_PROGRAMS = "same_programs"
    REWARD_HACKING = "reward_hacking"
    MISMATCH = "mismatch"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When each guard warns; 0 turns one off.

    entropy_floor     mean entropy of the sampled tokens below this, in nats
    repetition_share  share of rollouts that end in a repetition above this
    length_drift      mean length above this multiple of the first batches' mean length, or below its inverse
    hard_coding_share share of accepted programs that look hard-coded above this
    same_programs     share of a group's programs that repeat another one of the group above this
    reward_hacking    correlation of a reward model's scores with the verified rewards of the same rollouts below this
    mismatch          mean |log p of the learner - log p of the sampler| of the tokens that the same weights sampled, in
                      nats, above this; above mismatch_stop the run ends
    """

    entropy_floor: float
    repetition_share: float
    length_drift: float
    hard_coding_share: float
    same_programs: float
    reward_hacking: float
    mismatch: float
    mismatch_stop: float


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """The figures of one batch. None where the batch has no such figure. Length: mean tokens a rollout."""

    entropy: float | None
    length: float | None
    repetition_share: float | None
    hard_coding_share: float | None
    same_programs: float | None
    model_reward_correlation: float | None = None
    mismatch: float | None = None


WINDOW = 5  # batches whose mean a guard judges
# A guard, its figure and threshold, whether it warns of a mean below the threshold, and what it says.
_JUDGED = (
    (Guard.ENTROPY_FLOOR, "entropy", "entropy_floor", True, "the entropy {:.4f} is below {:g}"),
    (Guard.REPETITION, "repetition_share", "repetition_share", False, "{:.1%} of the rollouts end in a repetition"),
    (
        *(Guard.HARD_CODING, "hard_coding_share", "hard_coding_share", False),
        "{:.1%} of the accepted programs look hard-coded",
    ),
    (
        *(Guard.SAME_PROGRAMS, "same_programs", "same_programs", False),
        "{:.1%} of the programs of a group repeat another one of it",
    ),
    (
        *(Guard.REWARD_HACKING, "model_reward_correlation", "reward_hacking", True),
        "the reward model's scores correlate with the verified rewards at {:.2f}",
    ),
)


def warnings(batches: Sequence[BatchFigures], thresholds: Thresholds) -> dict[Guard, str]:
    """A sentence for each guard that warns of the last WINDOW batches. `batches` are all of the run, oldest first.

    The guard of the mismatch warns at once, of the last batch that has the figure. No other warns before there are
    WINDOW batches, and the guard of the length needs twice as many.
    """
    found = {}
    mismatch = next((batch.mismatch for batch in reversed(batches) if batch.mismatch is not None), None)
    if thresholds.mismatch and mismatch is not None and mismatch > thresholds.mismatch:
        found[Guard.MISMATCH] = mismatch_sentence(mismatch, thresholds.mismatch)
    if len(batches) < WINDOW:
        return found
    last = batches[-WINDOW:]
    for guard, figure, limit, is_floor, sentence in _JUDGED:
        value, threshold = _mean([getattr(batch, figure) for batch in last]), getattr(thresholds, limit)
        if threshold and value is not None and (value < threshold if is_floor else value > threshold):
            found[guard] = sentence.format(value, threshold)
    first_length, length = _mean([batch.length for batch in batches[:WINDOW]]), _mean([batch.length for batch in last])
    if thresholds.length_drift and len(batches) >= 2 * WINDOW and first_length and length:
        drift = length / first_length
        if not 1 / thresholds.length_drift <= drift <= thresholds.length_drift:
            found[Guard.LENGTH_DRIFT] = f"rollouts have {length:.0f} tokens, {drift:.2f} times those at first"
    return found


def mismatch_sentence(mismatch: float, threshold: float) -> str:
    """What a mismatch is, and what causes it."""
    return (
        f"the learner's log-probabilities of tokens that the same weights sampled differ from the sampler's by"
        f" {mismatch:.3f} nats on average, more than {threshold:g} (0.05 is usual in bfloat16, 0 in float32):"
        " generation and learner may have different weights (policy.path, an adapter, quantisation), another tokenizer"
        " or chat template, or the sampler's probabilities may be those after temperature or top_p"
    )


_TAIL = 512  # tokens
_GRAM = 8  # tokens
_REPEATED_SHARE = 0.5


def ends_in_repetition(token_ids: Sequence[int]) -> bool:
    """Whether at least half of the 8-grams among the last 512 tokens occur there more than once.

    Repetition loops last until the rollout is cut, so they are at its end. Shorter rollouts than 64 tokens are not
    judged.
    """
    tail = tuple(token_ids[-_TAIL:])
    num_grams = len(tail) - _GRAM + 1
    if len(tail) < _TAIL // 8:
        return False
    distinct = len({tail[start : start + _GRAM] for start in range(num_grams)})
    return num_grams - distinct >= _REPEATED_SHARE * num_grams


_BLOCK = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_READS = re.compile(r"\b(input|stdin|open|fileinput|argv)\b")
_DEFINES = re.compile(r"^\s*(async\s+def|def|class)\b", re.MULTILINE)
_LITERAL_TEST = re.compile(r"^\s*(el)?if\b[^\n]*==\s*[\[({\"'\d-]")
_LITERAL_ANSWER = re.compile(r"^\s*(return|print\s*\()\s*[\[({\"'\d-][^\n]*$")
_MIN_CASES = 3
_MAX_PROGRAM = 100_000  # characters


def looks_hard_coded(text: str) -> bool:
    """Whether the Python program in `text`, its last fenced block or all of it, seems to know the tests' answers.

    Either it prints without reading an input or defining a function, or at least half of its lines compare with a
    literal or answer with one, in three cases or more. A heuristic for Python: it looks at lines, and runs nothing.
    """
    program = _program_in(text)
    code = _code_lines(program)
    if not code:
        return False
    if "print" in program and not _READS.search(program) and not _DEFINES.search(program):
        return True
    tests = sum(bool(_LITERAL_TEST.match(line)) for line in code)
    answers = sum(bool(_LITERAL_ANSWER.match(line)) for line in code)
    return min(tests, answers) >= _MIN_CASES and 2 * (tests + answers) >= len(code)


def repeated_share(texts: Sequence[str]) -> float | None:
    """(n - distinct) / (n - 1) of the programs in the texts of a group: 0 if all differ, 1 if all are the same.

    The program is the last fenced block, or the whole text. Empty lines, comment lines and blanks at the end of a line
    do not count. None for fewer than two texts.
    """
    if len(texts) < 2:
        return None
    programs = {tuple(line.rstrip() for line in _code_lines(_program_in(text))) for text in texts}
    return (len(texts) - len(programs)) / (len(texts) - 1)


def _program_in(text: str) -> str:
    blocks = _BLOCK.findall(text)
    return str(blocks[-1] if blocks else text)[:_MAX_PROGRAM]


def _code_lines(program: str) -> list[str]:
    return [line for line in program.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


TEST = (
    "mean over problems of (reward in the last third of the batches - reward in the first third),"
    " 95 % bootstrap interval over problems"
)


class Direction(StrEnum):
    """RISES: the interval is above 0. FALLS: it is below 0. UNDECIDED: it holds 0."""

    RISES = "rises"
    FALLS = "falls"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class RewardTrend:
    """`first` and `last` are the mean rewards of the problems in the two thirds; `low` and `high` bound the gain."""

    num_problems: int
    first: float
    last: float
    gain: float
    low: float
    high: float

    @property
    def direction(self) -> Direction:
        """What the interval says."""
        if self.low > 0:
            return Direction.RISES
        return Direction.FALLS if self.high < 0 else Direction.UNDECIDED


@dataclass(frozen=True, slots=True)
class BatchRewards:
    """The rewards of the rollouts of one batch, by problem."""

    batch_id: int
    rewards: dict[str, tuple[float, ...]]


def reward_trend(batches: Sequence[BatchRewards], num_batches: int, seed: int = 0) -> RewardTrend:
    """The trend over a training of `num_batches`. Raises ValueError when no problem is in both thirds."""
    third = num_batches // 3
    first = _means(batch for batch in batches if batch.batch_id < third)
    last = _means(batch for batch in batches if batch.batch_id >= num_batches - third)
    common = sorted(first.keys() & last.keys())
    if not common:
        raise ValueError(f"no problem is in both the first and the last {third} of {num_batches} batches")
    gains = [last[name] - first[name] for name in common]
    low, high = bootstrap_interval(gains, seed)
    return RewardTrend(
        num_problems=len(common),
        first=_mean_reward([first[name] for name in common]),
        last=_mean_reward([last[name] for name in common]),
        gain=_mean_reward(gains),
        low=low,
        high=high,
    )


def _means(batches: Iterable[BatchRewards]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for batch in batches:
        for name, rewards in batch.rewards.items():
            found.setdefault(name, []).extend(rewards)
    return {name: _mean_reward(rewards) for name, rewards in found.items()}


def _mean_reward(values: Sequence[float]) -> float:
    return sum(values) / len(values)
