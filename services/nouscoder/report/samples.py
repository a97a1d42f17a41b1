"""Programs written by the policy: for the same held-out problems before and after, and during training.

rollouts.html shows the rollouts in tokens/ of a run folder, whose tokens are coloured by ratio and clip. The page holds
the records as JSON; its script (rollouts.js) shows the list and the rollout that is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from nouscoder.recorded_evaluations import EvaluatedSample
from nouscoder.report.charts import format_number
from nouscoder.report.markup import clip, escape
from nouscoder.report.run_data import EvaluationData, TrainingSample

_NUM_TRAINING_SAMPLES = 24


class Change(StrEnum):
    """How the result on a held-out problem changed."""

    GAINED = "gained"
    KEPT = "kept"
    LOST = "lost"
    STILL_FAILING = "still failing"


# The number of pairs shown for each change: mostly what was learned, but also what was not.
_SHOWN = {Change.GAINED: 6, Change.LOST: 3, Change.STILL_FAILING: 4, Change.KEPT: 1}


@dataclass(frozen=True, slots=True)
class ProgramPair:
    """A rollout before training and one after it, on the same problem."""

    before: EvaluatedSample
    after: EvaluatedSample

    @property
    def change(self) -> Change:
        """The change of the verdict from before to after."""
        if self.after.accepted:
            return Change.KEPT if self.before.accepted else Change.GAINED
        return Change.LOST if self.before.accepted else Change.STILL_FAILING


def pairs(before: EvaluationData | None, after: EvaluationData | None) -> list[ProgramPair]:
    """Pairs of rollouts of the same problem, in order. An evaluation holds the first rollout of each problem."""
    if before is None or after is None:
        return []
    waiting: dict[str, list[EvaluatedSample]] = {}
    for sample in after.samples:
        waiting.setdefault(sample.problem_id, []).append(sample)
    return [ProgramPair(sample, queue.pop(0)) for sample in before.samples if (queue := waiting.get(sample.problem_id))]


def chosen(found: Sequence[ProgramPair]) -> list[ProgramPair]:
    """The pairs to show: a few for each change, from different families if possible."""
    return [pair for kind, limit in _SHOWN.items() for pair in _spread(found, kind, limit)]


def pairs_section(found: Sequence[ProgramPair]) -> str:
    """The counts by change, and the chosen pairs side by side."""
    counts = {kind: sum(pair.change is kind for pair in found) for kind in Change}
    words = ", ".join(f"{counts[kind]} {kind.value}" for kind in Change)
    cards = "".join(_pair_card(pair) for pair in chosen(found))
    return f"<p>Of {len(found)} held-out problems, by the first rollout of each: {words}.</p>{cards}"


def training_section(samples: Sequence[TrainingSample]) -> str:
    """Rollouts of the training at even distances over the run, each collapsed to one line."""
    last = len(samples) - 1
    parts = _NUM_TRAINING_SAMPLES - 1
    shown = sorted({round(last * part / parts) for part in range(parts + 1)})
    return "".join(_training_card(samples[index]) for index in shown)


def badge(verdict: str) -> str:
    """A verdict, shown by sign and word as well as by colour."""
    kind, sign = ("good", "✓") if verdict == "accepted" else ("bad", "✗")
    return f'<span class="badge {kind}">{sign} {escape(verdict or "no verdict")}</span>'


def _spread(found: Iterable[ProgramPair], kind: Change, limit: int) -> list[ProgramPair]:
    """Up to `limit` pairs with this change: one of each family first, then others."""
    firsts: list[ProgramPair] = []
    others: list[ProgramPair] = []
    seen: set[str] = set()
    for pair in found:
        if pair.change is kind:
            (others if pair.before.family in seen else firsts).append(pair)
            seen.add(pair.before.family)
    return (firsts + others)[:limit]


def _pair_card(pair: ProgramPair) -> str:
    return (
        f'<article class="pair"><h3>{escape(pair.before.problem_id)}'
        f' <span class="change-word">{pair.change.value}</span></h3>'
        f'<pre class="prompt" tabindex="0">{escape(clip(pair.before.prompt.strip()))}</pre><div class="sides">'
        f"{_side('before', pair.before)}{_side('after', pair.after)}</div></article>"
    )


def _side(title: str, sample: EvaluatedSample) -> str:
    return f"<div><p>{title} {badge(sample.verdict)}</p>{_program(sample.program)}</div>"


def _training_card(sample: TrainingSample) -> str:
    versions = f"{format_number(sample.oldest_version)} to {format_number(sample.newest_version)}"
    if sample.oldest_version == sample.newest_version:
        versions = format_number(sample.oldest_version)
    facts = (
        f"step {format_number(sample.step)} · {escape(sample.problem_id)} · reward {format_number(sample.reward)}"
        f" · policy version {versions} · staleness {format_number(sample.staleness)}"
    )
    prompt = f'<pre class="prompt" tabindex="0">{escape(clip(sample.prompt.strip()))}</pre>'
    return f"<details><summary>{badge(sample.verdict)} {facts}</summary>{prompt}{_program(sample.program)}</details>"


def _program(program: str) -> str:
    if not program.strip():
        return '<p class="empty">(empty)</p>'
    return f'<pre class="program" tabindex="0"><code>{escape(clip(program))}</code></pre>'
