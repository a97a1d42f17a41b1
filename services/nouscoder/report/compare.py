"""The page of `nouscoder report compare RUN RUN`: the figures of several runs, one curve a run.

The sections are named after Figures 4 to 8 of NousCoder-14B's report. docs/reports.md says how far each corresponds to
its figure there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nouscoder.atomic_files import write_whole
from nouscoder.domain.signal import SCORE_DIGITS
from nouscoder.errors import Unusable
from nouscoder.report.charts import Chart, Series, format_number, line_chart, scrolled_table, with_error
from nouscoder.report.curves import Drawn, at_k, by_batch, common_k, figure, over_batches
from nouscoder.report.markup import escape, html_page, section
from nouscoder.report.run_data import EvaluationData, RunData, number, read_run, run_folder

MAX_RUNS = 8  # page.css has this many kinds of lines


class CannotCompare(Unusable):
    """The runs make no comparison. The message says why."""


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run by the name that the page gives it, and its evaluations by step."""

    name: str
    data: RunData
    evaluated: Mapping[float, EvaluationData]


@dataclass(frozen=True, slots=True)
class Curve:
    """The values of one run by step, and their errors."""

    values: Mapping[float, float]
    errors: Mapping[float, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Picture:
    """One quantity of every run. `without` is what the page says when no run has it."""

    title: str
    of: Callable[[ComparedRun], Curve]
    unit: str = ""
    low: float | None = 0
    high: float | None = None
    without: str = "No run has this figure: it is not in the lines of metrics.jsonl."


def write_comparison(file: Path, folders: Sequence[Path]) -> Path:
    """Write the page. Returns `file`. Raises CannotCompare, NotARun and StorageError."""
    if len(folders) < 2:
        raise CannotCompare("a comparison needs two runs or more")
    if len(folders) > MAX_RUNS:
        raise CannotCompare(f"a comparison shows at most {MAX_RUNS} runs, not {len(folders)}")
    known: set[Path] = set()
    for folder in folders:
        if folder.resolve() in known:
            raise CannotCompare(f"{folder} is given twice")
        known.add(run_folder(folder).resolve())
    write_whole(file, _page(_compared(folders)).encode("utf8"))
    return file


def _compared(folders: Sequence[Path]) -> list[ComparedRun]:
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [*map(str, folders)]
    found = [(name, read_run(folder)) for name, folder in zip(names, folders, strict=True)]
    return [ComparedRun(name, data, data.evaluated()) for name, data in found]


def _page(runs: Sequence[ComparedRun]) -> str:
    sections = [section("Results", _results(runs), "results")]
    for figure_number, (title, pictures) in _figures(runs).items():
        drawn = "".join(_picture(picture, runs) for picture in pictures)
        sections.append(
            section(f"Figure {figure_number}: {title}", f'<div class="charts">{drawn}</div>', f"figure-{figure_number}")
        )
    names = ", ".join(escape(run.name) for run in runs)
    return html_page(f"NousCoder: {len(runs)} runs", f"<p>{names}</p>", sections, _notes(runs))


def _figures(runs: Sequence[ComparedRun]) -> dict[int, tuple[str, Sequence[Picture]]]:
    k = _k(runs)
    return {
        4: (
            "training reward",
            [
                _of_batches("reward of trained groups", "reward_mean", low=None),
                _of_batches("reward of all groups", "all_groups.reward_mean", low=None),
            ],
        ),
        5: (
            "evaluation",
            [Picture("evaluation pass@1", _pass_at_1, low=None, without="No run has an evaluation of its policies.")],
        ),
        6: (
            "response length",
            [
                _of_batches("response length", "response_length", " tokens"),
                _of_batches("truncated share", "overlong_share"),
            ],
        ),
        7: (
            "pass@G and pass@k",
            [
                _of_batches("training pass@G, trained groups", "pass_at_g", high=1),
                _of_batches("training pass@G, all groups", "all_groups.pass_at_g", high=1),
                Picture(
                    f"evaluation pass@{k or 'k'}",
                    lambda run: Curve(at_k(run.evaluated, k)),
                    low=None,
                    without="No k is common to all evaluations: they need several samples a problem.",
                ),
            ],
        ),
        8: (
            "entropy, clipping and mismatch",
            [
                _of_batches("entropy", "entropy", " nats"),
                _of_batches("clip share, low side", "clip_fraction_low"),
                _of_batches("clip share, high side", "clip_fraction_high"),
                _of_batches("learner to sampler divergence", "mismatch_kl", " nats"),
            ],
        ),
    }


def _k(runs: Sequence[ComparedRun]) -> int | None:
    return common_k(each for run in runs for each in run.evaluated.values())


def _of_batches(title: str, key: str, unit: str = "", *, low: float | None = 0, high: float | None = None) -> Picture:
    """The mean over the steps of each batch of a field of metrics.jsonl, at the batch's last step."""
    return Picture(title, lambda run: Curve(over_batches(by_batch(run.data.metrics), key)), unit, low, high)


def _pass_at_1(run: ComparedRun) -> Curve:
    found = run.evaluated.items()
    return Curve(
        {step: each.pass_at_1 for step, each in found if each.pass_at_1 is not None},
        {step: each.standard_error for step, each in found if each.standard_error is not None},
    )


def _picture(picture: Picture, runs: Sequence[ComparedRun]) -> str:
    """The chart as a figure. Without a value in any run: the reason."""
    curves = {run.name: picture.of(run) for run in runs}
    xs = sorted({step for curve in curves.values() for step in curve.values})
    if not xs:
        title = f"<figcaption><h3>{escape(picture.title)}</h3></figcaption>"
        return f'<figure>{title}<p class="empty">{escape(picture.without)}</p></figure>'
    series = tuple(
        Series(name, tuple(map(curve.values.get, xs)), tuple(map(curve.errors.get, xs)), joined=True)
        for name, curve in curves.items()
    )
    missing = ", ".join(name for name, curve in curves.items() if not curve.values)
    notes = [*(["Whiskers: one standard error over problems."] if any(c.errors for c in curves.values()) else [])]
    notes += [f"Not in: {missing}."] if missing else []
    chart = Chart(
        picture.title, "step", tuple(xs), series, picture.unit, picture.low, picture.high, note=" ".join(notes)
    )
    return figure(Drawn(chart, line_chart(chart)))


def _results(runs: Sequence[ComparedRun]) -> str:
    """A row for each run: its steps, pass@1 of its first, last and best policy, and pass@k of its last."""
    k = _k(runs)
    names = ("", "steps", "first pass@1", "last pass@1", "best pass@1", "at step", f"last pass@{k or 'k'}")
    return scrolled_table("results", names, (_result(run, k) for run in runs))


def _result(run: ComparedRun, k: int | None) -> str:
    curve = _pass_at_1(run)
    steps = [*curve.values]
    best = max(steps, key=lambda step: (round(curve.values[step], SCORE_DIGITS), -step), default=None)

    def shown(step: float | None) -> str:
        if step is None:
            return "-"
        return with_error(curve.values[step], curve.errors.get(step))

    last = number(run.data.metrics[-1], "step") if run.data.metrics else None
    ends = (steps[0], steps[-1]) if steps else (None, None)
    last_rates = next((each.pass_at_k for each in reversed([*run.evaluated.values()])), {})
    rate = None if k is None else last_rates.get(k)
    cells = [format_number(last), *map(shown, (*ends, best)), format_number(best), format_number(rate)]
    return f'<tr><th scope="row">{escape(run.name)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def _notes(runs: Sequence[ComparedRun]) -> str:
    found = [
        f"{escape(name)} of {escape(run.name)} could not be read." for run in runs for name in run.data.unreadable_files
    ]
    return " ".join(found)
