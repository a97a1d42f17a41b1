"""Makes report.html from a run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from nouscoder.atomic_files import write_whole
from nouscoder.domain.run_status import Ledger
from nouscoder.errors import NousCoderError
from nouscoder.report.charts import dumbbell, format_number
from nouscoder.report.curves import curves, figure
from nouscoder.report.markup import escape, html_page, section, tiles
from nouscoder.report.rollouts_page import sorting_heads, write_rollouts_page
from nouscoder.report.run_data import Record, RunData, number, read_run, value_at, whole_number
from nouscoder.report.samples import pairs, pairs_section, training_section
from nouscoder.report.untrained import read_untrained

_CURVES_NOTE = "One point per batch, at its last step; throughput, gradient norm and loss have one point per step."
_TOKENS_NOTE = '<p class="note"><a href="rollouts.html">rollouts.html</a> shows tokens by ratio and clip.</p>'
_ASKED = {"model": "policy.path", "data": "problems.train"}
_ASKED |= {"objective": "learner.objective.name", "learning rate": "learner.learning_rate"}
_END_OF_TIME = 2.5e11  # in the year 9892
_FINAL = ("trained", "filtered", "stale", "abandoned", "lost")


class NothingToReport(NousCoderError):
    """A run folder without a batch and without an evaluation."""


def write_report(run_folder: Path) -> Path:
    """Write report.html and rollouts.html into the folder. Raises FileNotFoundError, NothingToReport, StorageError."""
    report = run_folder / "report.html"
    run = read_run(run_folder)
    if run.is_empty:
        raise NothingToReport(
            f"the run in {run_folder} has trained nothing and evaluated nothing yet, so it has no report"
        )
    left = read_untrained(run_folder)
    write_whole(report, page(run, left.lines(run_folder) if left else ()).encode("utf8"))
    write_rollouts_page(run_folder)
    return report


def page(run: RunData, untrained: Sequence[str] = ()) -> str:
    """The whole page. `untrained` are the lines of the problems that gave no training."""
    left = [section("Problems that gave no training", f"<pre>{escape(chr(10).join(untrained))}</pre>")]
    sections = [*_sections(run), *(left if untrained else [])]
    return html_page(f"NousCoder run {run.name}", _headline(run), sections, _notes(run))


def _sections(run: RunData) -> list[str]:
    drawn = curves(run)
    compared = pairs(run.before, run.after)
    sections = []
    if drawn:
        sections.append(
            section(
                "Curves",
                f'<p class="note">{_CURVES_NOTE}</p><div class="charts">{"".join(map(figure, drawn))}</div>',
            )
        )
    before, after = run.before, run.after
    if families := _groups("family", before.by_family if before else {}, after.by_family if after else {}):
        sections.append(section("Held-out pass@1 by family", families))
    of_languages = before.by_language if before else {}, after.by_language if after else {}
    if any(len(rates) > 1 for rates in of_languages):
        sections.append(section("Held-out pass@1 by language", _groups("language", *of_languages)))
    if compared:
        sections.append(section("Programs before and after", pairs_section(compared)))
    if run.samples:
        sections.append(section("Rollouts of the training", _TOKENS_NOTE + training_section(run.samples)))
    return sections


def _headline(run: RunData) -> str:
    before = _first(number(run.summary, "pass_at_1_before"), run.before.pass_at_1 if run.before else None)
    after = _first(number(run.summary, "pass_at_1_after"), run.after.pass_at_1 if run.after else None)
    change = "" if before is None or after is None else f'<span class="change-word">{after - before:+.3f}</span>'
    unfinished = "" if run.summary else f'<p class="warning">{_unfinished(run)}</p>'
    return (
        f'<p class="hero"><span class="hero-label">held-out pass@1</span>'
        f'<span class="hero-value">{_rate(before)} <span aria-label="to">→</span> {_rate(after)}</span>{change}</p>'
        f"{unfinished}{tiles(_facts(run))}{_what_was_run(run)}{_ledger(run.summary)}"
    )


def _unfinished(run: RunData) -> str:
    if run.metrics:
        return "This run has not ended: it has no summary yet."
    return "This run has trained nothing yet, so it has no curves; it has not ended."


def _facts(run: RunData) -> dict[str, str]:
    steps = _first(number(run.summary, "steps"), number(run.metrics[-1], "step") if run.metrics else None)
    seconds = number(run.summary, "learning_seconds")
    evaluation = run.after or run.before
    return {
        "seed": format_number(number(run.summary, "seed")),
        "steps": format_number(steps),
        "learning time": "-" if seconds is None else f"{int(seconds) // 60} min {int(seconds) % 60:02} s",
        "held-out problems": format_number(evaluation.num_problems if evaluation else None),
        "last policy version": format_number(run.after.policy_version if run.after else None),
    }


def _what_was_run(run: RunData) -> str:
    """What of the configuration a reader asks for first, when the run began and with which version."""
    words = {name: value_at(run.config, key) for name, key in _ASKED.items()}
    words["model"] = f"{words['model']} ({kind})" if (kind := run.first_policy.get("model_type")) else words["model"]
    time = number(run.metrics[0], "time") if run.metrics else None
    begun = None if time is None else datetime.fromtimestamp(min(max(0.0, time), _END_OF_TIME), UTC)
    words |= {"first step": begun and f"{begun:%Y-%m-%d %H:%M} UTC", "NousCoder": run.summary.get("version")}
    found = [f"{name} <b>{escape(value)}</b>" for name, value in words.items() if value]
    found += ['all values: <a href="config.toml">config.toml</a>'] if run.config else []
    return f'<p class="ledger">{" · ".join(found)}</p>' if found else ""


def _ledger(summary: Record) -> str:
    """The numbers of the ledger. The balance is computed here again, not taken from the summary."""
    ledger = ledger_of(summary)
    if ledger is None:
        return ""
    in_flight = ", ".join(f"{escape(name)} {count}" for name, count in ledger.in_flight.items() if count)
    balanced = ledger.balanced and summary.get("balanced") is not False
    badge = (
        '<span class="badge good">✓ balanced</span>' if balanced else '<span class="badge bad">✗ NOT BALANCED</span>'
    )
    terms = " + ".join(f"{name} <b>{getattr(ledger, name)}</b>" for name in _FINAL)
    flight = f"in flight <b>{sum(ledger.in_flight.values())}</b>" + (f" ({in_flight})" if in_flight else "")
    return f'<p class="ledger">ledger {badge} admitted <b>{ledger.admitted}</b> = {terms} + {flight}</p>'


def ledger_of(summary: Record) -> Ledger | None:
    """The ledger in a summary.json, None when it is not there whole."""
    counts = {name: whole_number(summary, f"ledger.{name}") for name in ("admitted", *_FINAL)}
    known = {name: count for name, count in counts.items() if count is not None}
    if len(known) < len(counts):
        return None
    record = summary["ledger"].get("in_flight")
    names = list(record) if isinstance(record, dict) else []
    return Ledger(**known, in_flight={str(name): whole_number(record, name) or 0 for name in names})


def _groups(what: str, before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """One row per family or language, the largest gain first. A click on a heading sorts by that column."""
    names = sorted({*before, *after}, key=lambda name: (before.get(name, 0.0) - after.get(name, 0.0), name))
    if not names:
        return ""
    rows = "".join(_group_row(name, before.get(name), after.get(name)) for name in names)
    heads = sorting_heads((what, "before", "after", "change"))
    return (
        '<p class="legend-line">ring: before, dot: after, on a line from 0 to 1</p><div class="scroll">'
        f'<table class="families"><thead><tr>{heads}<td></td></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _group_row(name: str, before: float | None, after: float | None) -> str:
    change = None if before is None or after is None else after - before
    shown = "-" if change is None else f"{change:+.2f}"
    return (
        f'<tr><th scope="row">{escape(name)}</th><td>{_rate(before, 2)}</td><td>{_rate(after, 2)}</td>'
        f"<td>{shown}</td><td>{dumbbell(before, after)}</td></tr>"
    )


def _notes(run: RunData) -> str:
    notes = [f"{escape(name)} could not be read." for name in run.unreadable_files]
    if run.num_unreadable_lines:
        notes.append(f"{run.num_unreadable_lines} lines of metrics.jsonl and samples.jsonl could not be read.")
    return " ".join(notes)


def _rate(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
