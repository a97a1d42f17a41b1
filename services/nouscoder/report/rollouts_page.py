"""rollouts.html: the rollouts of a run, to browse."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from nouscoder.atomic_files import numbered, write_whole
from nouscoder.domain.verdict import VerdictKind
from nouscoder.report.charts import format_number
from nouscoder.report.markup import asset, html_page, section, tiles, visible
from nouscoder.report.run_data import number, read_run

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
