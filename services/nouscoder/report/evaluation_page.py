"""Makes the report of an evaluation: pass@k, its parts, lengths, truncation, failures, and samples to browse.

Long texts are clipped, and the page is meant for at most MOST_SHOWN samples; samples.jsonl has all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nouscoder.atomic_files import write_whole
from nouscoder.domain.estimates import Elo, elo_text
from nouscoder.domain.prompt import PromptSettings
from nouscoder.report.charts import Chart, Series, count_chart, format_number, interval, scrolled_table
from nouscoder.report.curves import Drawn, figure
from nouscoder.report.markup import clip, escape, html_page, section, tiles
from nouscoder.report.samples import badge

MOST_SHOWN = 400
_MOST_DISAGREEMENTS = 200

Record = dict[str, Any]
_table = partial(scrolled_table, "results")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class ShownSample:
    """A sample for the page. `reasoning` is empty when the server does not separate it."""

    problem_id: str
    position: int
    prompt: str
    reasoning: str
    answer: str
    verdict: str
    detail: str
    is_truncated: bool


def write_evaluation_report(path: Path, record: Record, samples: Sequence[ShownSample]) -> None:
    """Write the page of report.json's record. Raises StorageError."""
    write_whole(path, evaluation_page(record, samples).encode("utf8"))


def evaluation_page(record: Record, samples: Sequence[ShownSample]) -> str:
    """The page."""
    sections = [section("pass@k", _pass_at_k(record))]
    for group in ("difficulty", "platform", "month", *(["language"] if _has_several_languages(record) else [])):
        sections.append(section(f"pass@1 by {group}", _by(record, group)))
    if any(results["elo"] for results in record["profiles"].values()):
        sections.append(section("Elo rating", _elo(record)))
    sections.append(section("Verdicts", _verdicts(record)))
    sections.append(section("Lengths", f'<div class="charts">{_lengths(record)}</div>'))
    if len(record["profiles"]) > 1:
        sections.append(section("Where the profiles disagree", _disagreements(record)))
    sections.append(section("Samples", _browser(samples)))
    return html_page(f"Evaluation of {record['model'] or record['problem_file']}", _headline(record), sections)


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` of the items, at even distances."""
    step = max(1.0, len(items) / most)
    return [items[int(number * step)] for number in range(min(len(items), most))]


def _headline(record: Record) -> str:
    profile, results = next(iter(record["profiles"].items()))
    first = results["pass_at_k"]["1"]
    num_samples, truncated = record["num_samples"], record["truncated"]
    facts = {
        "problems": f"{record['num_problems']}",
        "samples": f"{num_samples}",
        "truncated": f"{truncated['samples'] / num_samples:.1%}",
        f"mean {record['lengths']['unit']}": format_number(record["lengths"]["mean"]),
        "grading": escape(profile),
        **{escape(name): escape(value) for name, value in _sampling_facts(record).items()},
    }
    return (
        '<p class="hero"><span class="hero-label">pass@1 and its 95% bootstrap interval over problems</span>'
        f'<span class="hero-value">{first["value"]:.3f}</span>'
        f'<span class="change-word">{first["low"]:.3f} to {first["high"]:.3f}</span></p>{tiles(facts)}'
    )


def _sampling_facts(record: Record) -> dict[str, object]:
    sampling = dict(record["sampling"])
    if "prompt" in sampling:
        sampling["prompt"] = PromptSettings(**sampling["prompt"]).described
    names = ("file", "temperature", "top_p", "max_tokens", "seed", "prompt")
    window = record["window"]
    dates = {"dates": f"{window['since'] or '…'} to {window['until'] or '…'}"} if any(window.values()) else {}
    return {name: sampling[name] for name in names if name in sampling} | dates


def _pass_at_k(record: Record) -> str:
    rows: list[tuple[str, list[str], Record]] = [
        (f"{profile}, k = {k}" if len(record["profiles"]) > 1 else f"k = {k}", [], estimate)
        for profile, results in record["profiles"].items()
        for k, estimate in results["pass_at_k"].items()
    ]
    return _estimates(("", "pass@k", "95% interval", ""), rows)


def _has_several_languages(record: Record) -> bool:
    """Whether there is more than one. Reports of before have none."""
    return any(len(results["by"].get("language", ())) > 1 for results in record["profiles"].values())


def _by(record: Record, group: str) -> str:
    rows = [
        (f"{row['name']} ({profile})" if len(record["profiles"]) > 1 else row["name"], [f"{row['num_problems']}"], row)
        for profile, results in record["profiles"].items()
        for row in results["by"][group]
    ]
    return _estimates((group, "problems", "pass@1", "95% interval", ""), rows)


def _elo(record: Record) -> str:
    rows = [
        f'<tr><th scope="row">{escape(profile)}</th><td>{one["num_problems"]}</td>'
        f"<td>{escape(elo_text(Elo(one['value'], one['low'], one['high'])))}</td></tr>"
        for profile, results in record["profiles"].items()
        if (one := results["elo"])
    ]
    note = (
        '<p class="note">The most likely rating on the scale of Codeforces and its 95% interval, from the problems that'
        " have a rating.</p>"
    )
    return _table(("grading", "problems", "rating"), rows) + note


def _estimates(names: Sequence[str], rows: Sequence[tuple[str, list[str], Record]]) -> str:
    """A table of (name, further cells, estimate)."""
    body = [
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}'
        f"<td>{one['value']:.4f}</td><td>{one['low']:.3f} to {one['high']:.3f}</td>"
        f"<td>{interval(one['value'], one['low'], one['high'])}</td></tr>"
        for name, cells, one in rows
    ]
    return _table(names, body)


def _verdicts(record: Record) -> str:
    total = record["num_samples"]
    rows = [
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(profile)}</td><td>{count}</td>'
        f"<td>{count / total:.1%}</td></tr>"
        for profile, results in record["profiles"].items()
        for name, count in results["verdicts"].items()
    ]
    truncated = record["truncated"]
    note = (
        f'<p class="note">{truncated["samples"]} samples reached max_tokens; {truncated["accepted"]} of them were'
        " accepted.</p>"
    )
    return _table(("verdict", "grading", "samples", "share"), rows) + note


def _lengths(record: Record) -> str:
    lengths = record["lengths"]
    unit, width = lengths["unit"], lengths["bin_width"]
    chart = Chart(
        title=f"Length in {unit}",
        x_label=f"{unit}, from",
        xs=tuple(float(width * number) for number in range(len(lengths["accepted"]))),
        series=(
            Series("accepted", tuple(map(float, lengths["accepted"]))),
            Series("not accepted", tuple(map(float, lengths["others"]))),
        ),
        unit=" samples",
        note=f"Each bar covers {width} {unit}.",
        is_layered=True,
    )
    return figure(Drawn(chart, count_chart(chart)))


def _disagreements(record: Record) -> str:
    found = record["disagreements"]
    profiles = list(record["profiles"])
    rows = [
        f'<tr><th scope="row">{escape(one["problem_id"])}</th><td>{one["position"]}</td>'
        + "".join(f"<td>{badge(one['verdicts'][profile])}</td>" for profile in profiles)
        + "</tr>"
        for one in found[:_MOST_DISAGREEMENTS]
    ]
    more = f" The first {len(rows)} are listed; report.json has all." if len(found) > len(rows) else ""
    note = (
        f'<p class="note">{len(found)} of {record["num_samples"]} samples are accepted by one profile only.{more}</p>'
    )
    return note + (_table(("problem", "sample", *profiles), rows) if rows else "")


def _browser(samples: Sequence[ShownSample]) -> str:
    verdicts = sorted({sample.verdict for sample in samples})
    options = "".join(f'<option value="{escape(name)}">{escape(name)}</option>' for name in verdicts)
    form = (
        f'<form class="filters"><label>verdict <select><option value="">all</option>{options}</select></label>'
        '<label>problem <input type="search" autocomplete="off"></label><output class="note"></output></form>'
    )
    return form + "".join(map(_card, samples))


def _card(sample: ShownSample) -> str:
    truncated = " · truncated" if sample.is_truncated else ""
    reasoning = (
        f'<p class="note">reasoning</p><pre class="prompt" tabindex="0">{escape(clip(sample.reasoning))}</pre>'
        if sample.reasoning
        else ""
    )
    return (
        f'<details data-verdict="{escape(sample.verdict)}" data-problem="{escape(sample.problem_id)}"><summary>'
        f"{badge(sample.verdict)} {escape(sample.problem_id)} · sample {sample.position} · {escape(sample.detail)}"
        f'{truncated}</summary><pre class="prompt" tabindex="0">{escape(clip(sample.prompt.strip()))}</pre>{reasoning}'
        f'<pre class="program" tabindex="0"><code>{escape(clip(sample.answer))}</code></pre></details>'
    )
