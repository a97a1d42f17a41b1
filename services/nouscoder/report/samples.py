"""Programs written by the policy: for the same held-out problems before and after, and during training.

rollouts.html shows the rollouts in tokens/ of a run folder, whose tokens are coloured by ratio and clip. The page holds
the records as JSON; its script (rollouts.js) shows the list and the rollout that is chosen.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from string import Template
from typing import Any

from nouscoder.atomic_files import numbered, write_whole
from nouscoder.domain.verdict import VerdictKind
from nouscoder.recorded_evaluations import EvaluatedSample
from nouscoder.report.charts import format_number
from nouscoder.report.markup import asset, clip, escape, html_page, section, tiles, visible
from nouscoder.report.run_data import EvaluationData, TrainingSample, number, read_run

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


# rollouts.html.

# What a page holds at most, so that a browser can show it.
MAX_TOKENS = 400_000
PER_TOKEN = ("tokens", "versions", "ratios", "mismatches", "clipped")


def write_rollouts_page(run_folder: Path) -> Path:
    """Write rollouts.html into the run folder. Raises StorageError."""
    page = run_folder / "rollouts.html"
    write_whole(page, rollouts_page(run_folder).encode("utf8"))
    return page


def rollouts_page(run_folder: Path, max_tokens: int = MAX_TOKENS) -> str:
    """The whole page."""
    rollouts = _shared(read_rollouts(run_folder), max_tokens)
    run, shown = read_run(run_folder), (len({one["batch_id"] for one in rollouts}), len(rollouts))
    trained = len({line.get("batch_id") for line in run.metrics})
    of = trained, trained * (number(run.config, "broker.batch_size") or 0)
    words = [f"{here} of {format_number(there)}" if there else str(here) for here, there in zip(shown, of, strict=True)]
    facts = tiles(dict(zip(("batches", "rollouts"), words, strict=True)))
    return html_page(
        f"Rollouts of {run_folder.name}",
        _TO_REPORT + facts,
        [section("Rollouts", _browser(rollouts))],
        assets=("page", "rollouts"),
    )


def read_rollouts(run_folder: Path) -> list[dict[str, Any]]:
    """The records of the readable files of tokens/, in order of batches, each with its batch_id."""
    return [one for file in numbered(run_folder / "tokens", ".json").values() for one in _read_batch(file)]


def batch_json(run_folder: Path, batch_id: int, max_tokens: int = MAX_TOKENS) -> str:
    """The rollouts of one batch as a page holds them; none when there are no records of it."""
    file = numbered(run_folder / "tokens", ".json").get(batch_id)
    return json.dumps(_shared([] if file is None else _read_batch(file), max_tokens), separators=(",", ":"))


def _read_batch(file: Path) -> list[dict[str, Any]]:
    try:
        record = json.loads(file.read_text(encoding="utf8", errors="replace"))
        return [{**one, "batch_id": record["batch_id"]} for one in record["rollouts"]]
    except (OSError, ValueError, KeyError, TypeError):  # removed meanwhile, or damaged
        return []


def _shared(rollouts: Sequence[Mapping[str, Any]], max_tokens: int) -> list[dict[str, Any]]:
    """The records, each with an equal share of the tokens."""
    return [_shortened(one, max(2, max_tokens // len(rollouts))) for one in rollouts]


def _shortened(record: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """The record with its first and last tokens, `max_tokens` at most, and with texts that are safe to show."""
    size = len(record["tokens"])
    half = max_tokens // 2
    cut = {
        name: record[name] if size <= max_tokens else record[name][:half] + record[name][-half:] for name in PER_TOKEN
    }
    left_out = record["left_out"] + size - len(cut["tokens"])
    return {
        **record,
        **cut,
        "left_out": left_out,
        "tokens": [visible(token) for token in cut["tokens"]],
        "prompt": visible(record["prompt"]),
        "problem_id": visible(record["problem_id"]),
    }


_TO_REPORT = (
    '<p class="note">A sample: the learner keeps the tokens of a few rollouts, of the newest batches and of some older'
    ' ones. <a href="report.html">report.html</a> has the curves of the run.</p>'
)


def _browser(rollouts: list[dict[str, Any]]) -> str:
    if not rollouts:
        return '<p class="empty">There are no records of tokens yet: the learner writes some for each batch.</p>'
    # A "<" could end the script element.
    data = json.dumps(rollouts, separators=(",", ":")).replace("<", "\\u003c")
    return f'{browser()}<script type="application/json" id="rollouts-data">{data}</script>'


def browser() -> str:
    """The empty list of rollouts with its filters, which rollouts.js fills."""
    heads = sorting_heads(("step", "versions", "reward", "advantage", "length", "clipped", "verdict", "problem"))
    verdicts = "".join(f"<option>{kind}</option>" for kind in VerdictKind)
    return Template(asset("rollouts.html").replace("\n", "")).substitute(heads=heads, verdicts=verdicts)


def sorting_heads(names: Iterable[str]) -> str:
    """Headings of a table; a click on one sorts by its column."""
    return "".join(f'<th scope="col"><button type="button">{name}</button></th>' for name in names)
