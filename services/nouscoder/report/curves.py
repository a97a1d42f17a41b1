"""The charts of a run, made from the lines of metrics.jsonl and from its evaluations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

from nouscoder.report.charts import Chart, Series, Values, framed, legend_of, line_chart, share_chart, table
from nouscoder.report.run_data import EvaluationData, Record, RunData, number

Lines = Sequence[Record]
Fold = Callable[[list[float]], float]

_TIME_PARTS = (
    ("training", "seconds.train"),
    ("waiting for a batch", "seconds.wait_for_batch"),
    ("checkpoint", "seconds.checkpoint"),
    ("publishing", "seconds.publish"),
)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A chart and its SVG text."""

    chart: Chart
    svg: str


def curves(run: RunData) -> list[Drawn]:
    """The charts with at least one value, in reading order."""
    if not run.metrics:
        return []
    drawn = [Drawn(chart, share_chart(chart) if chart.is_layered else line_chart(chart)) for chart in charts(run)]
    return [item for item in drawn if item.svg]


def charts(run: RunData) -> list[Chart]:
    """Every chart of a run in reading order, also those without a value. Always the same number of them."""
    batches = by_batch(run.metrics)
    return [
        *(pass_rate_chart(run, batches), *_evaluation_charts(run, batches), *_batch_charts(batches)),
        *(time_chart(batches), *_step_charts(run.metrics)),
    ]


def by_batch(metrics: Sequence[Record]) -> list[list[Record]]:
    """The lines of each batch, in order of step."""
    batches: dict[float, list[Record]] = {}
    for line in metrics:
        batches.setdefault(number(line, "batch_id", "step") or 0.0, []).append(line)
    return list(batches.values())


def pass_rate_chart(run: RunData, batches: Sequence[Lines]) -> Chart:
    """The pass rate of the trained rollouts and of all groups, and pass@1 on held-out problems."""
    held_out = {step: each.pass_at_1 for step, each in run.evaluated().items() if each.pass_at_1 is not None}
    return overlaid(
        "Pass rate",
        {
            "rollouts trained on": over_batches(batches, "pass_rate"),
            "held-out pass@1": held_out,
            "all groups": over_batches(batches, "all_groups.pass_rate"),
        },
        xs=(0.0, *_last_steps(batches)),
        note="When zero-variance groups are dropped, groups that all passed or all failed are filtered. This keeps the"
        " rate of the rollouts trained on near the middle. All groups are those that became complete meanwhile, also"
        " the filtered ones. Held-out pass@1 measures progress.",
    )


def overlaid(title: str, curves: Mapping[str, Mapping[float, float]], xs: Sequence[float], note: str = "") -> Chart:
    """A chart of shares by step. The curves may have values at different steps; `xs` are more steps of the axis."""
    steps = sorted({*xs, *(step for curve in curves.values() for step in curve)})
    series = tuple(
        Series(name, tuple(curve.get(step) for step in steps), joined=True) for name, curve in curves.items() if curve
    )
    return Chart(title, "step", tuple(steps), series, low=0, high=1, note=note)


def common_k(evaluations: Iterable[EvaluationData]) -> int | None:
    """The largest k above 1 for which all of them have pass@k, without those of one sample a problem."""
    found = [{*each.pass_at_k} for each in evaluations if each.pass_at_k]
    return max(set.intersection(*found), default=None) if found else None


def at_k(evaluated: Mapping[float, EvaluationData], k: int | None) -> dict[float, float]:
    """pass@k by step."""
    return {step: each.pass_at_k[k] for step, each in evaluated.items() if k is not None and k in each.pass_at_k}


def _evaluation_charts(run: RunData, batches: Sequence[Lines]) -> list[Chart]:
    """pass@1 with its standard error, and the share of problems that some rollout solves."""
    found = {step: each for step, each in run.evaluated().items() if each.pass_at_1 is not None}
    k = common_k(found.values())
    errors = tuple(each.standard_error for each in found.values())
    pass_at_1 = Series("held-out pass@1", tuple(each.pass_at_1 for each in found.values()), errors, joined=True)
    solved = {
        "trained groups (pass@G)": over_batches(batches, "pass_at_g"),
        "all groups (pass@G)": over_batches(batches, "all_groups.pass_at_g"),
        f"held-out pass@{k}": at_k(found, k),
    }
    return [
        Chart("Evaluations", "step", tuple(found), (pass_at_1,), note="Whiskers: one standard error over problems."),
        overlaid("Solved at least once", solved, xs=_last_steps(batches)),
    ]


def time_chart(batches: Sequence[Lines]) -> Chart:
    """The learner's seconds by batch and by activity."""
    series = tuple(Series(name, _over(batches, lambda parts: round(sum(parts), 3), key)) for name, key in _TIME_PARTS)
    totals = [(item.name, sum(value or 0.0 for value in item.values)) for item in series]
    words = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in totals)
    xs = tuple(number(lines[0], "batch_id") or float(index) for index, lines in enumerate(batches))
    return Chart(
        "Where the learner's time went", "batch", xs, series, " s", note=f"In total: {words}.", is_layered=True
    )


def _batch_charts(batches: Sequence[Lines]) -> list[Chart]:
    """Charts with one point per batch, at its last step. The keys are those of learner/state/run_log.py."""

    def chart(
        title: str, *series: Series, unit: str = "", low: float | None = None, high: float | None = None
    ) -> Chart:
        return Chart(title, "step", _last_steps(batches), series, unit, low, high)

    def curve(name: str, key: str, fold: Fold = mean) -> Series:
        return Series(name, _over(batches, fold, key))

    return [
        chart("Reward", curve("trained groups", "reward_mean"), curve("all groups", "all_groups.reward_mean")),
        chart(
            *("Staleness", curve("mean", "staleness_mean"), curve("max", "staleness_max", max)),
            unit=" versions",
            low=0,
        ),
        chart(
            *("Response length", curve("correct", "response_length_correct")),
            curve("incorrect", "response_length_incorrect"),
            unit=" tokens",
            low=0,
        ),
        chart("Overlong rollouts", curve("share cut at the token limit", "overlong_share"), low=0, high=1),
        chart("Entropy", curve("mean of the tokens", "entropy"), unit=" nats", low=0),
        chart(
            *("Importance ratio", curve("mean", "ratio_mean"), curve("max", "ratio_max", max)),
            curve("min", "ratio_min", min),
        ),
        chart("Clip fraction", curve("low side", "clip_fraction_low"), curve("high side", "clip_fraction_high"), low=0),
        chart("Learner to sampler ratio", curve("mean", "mismatch_mean"), curve("max", "mismatch_max", max)),
        chart(
            *("Learner to sampler divergence", curve("all tokens", "mismatch_kl")),
            curve("rollouts of one version", "mismatch_kl_versions_1"),
            curve("of four and more", "mismatch_kl_versions_4"),
            unit=" nats",
            low=0,
        ),
        chart("Effective sample size", curve("share of the tokens", "effective_sample_size"), low=0, high=1),
    ]


def _step_charts(metrics: Sequence[Record]) -> list[Chart]:
    xs = tuple(number(line, "step") or 0.0 for line in metrics)

    def chart(title: str, name: str, key: str, low: float | None = None) -> Chart:
        return Chart(title, "step", xs, (Series(name, tuple(number(line, key) for line in metrics)),), low=low)

    return [
        chart("Learner throughput", "tokens a second", "tokens_per_second", low=0),
        chart("Gradient norm", "before clipping", "gradient_norm", low=0),
        chart("Loss", "objective", "loss"),
    ]


def _last_steps(batches: Sequence[Lines]) -> tuple[float, ...]:
    return tuple(number(lines[-1], "step") or 0.0 for lines in batches)


def over_batches(batches: Sequence[Lines], key: str) -> dict[float, float]:
    """The mean over the lines of each batch, by its last step. Batches without a value are left out."""
    found = zip(_last_steps(batches), _over(batches, mean, key), strict=True)
    return {step: value for step, value in found if value is not None}


def _over(batches: Sequence[Lines], fold: Fold, key: str) -> Values:
    """One value per batch: `fold` over the values of its lines, None when they have none."""
    found = ([value for line in lines if (value := number(line, key)) is not None] for lines in batches)
    return tuple(fold(values) if values else None for values in found)


def figure(drawn: Drawn) -> str:
    """The figure, with a place for the values at the pointer."""
    chart, readout = drawn.chart, '<div class="readout" aria-live="polite" hidden></div>'
    legend = legend_of((_mark(drawn, index), series.name) for index, series in enumerate(chart.series))
    title = chart.title + (f", in{chart.unit}" if chart.unit and not chart.is_layered else "")
    title += ", log axis" if chart.is_logarithmic else ""
    return framed(title, legend, f"{drawn.svg}{readout}", chart.note, table(chart))


def _mark(drawn: Drawn, index: int) -> str:
    """The mark of a series in the legend: a layer, a dot when no two values are joined, else a line."""
    series = drawn.chart.series[index]
    if drawn.chart.is_layered:
        return f'<rect class="fill-{index}" x="6" y="0" width="10" height="10"/>'
    values = [value for value in series.values if value is not None] if series.joined else series.values
    if (series.joined and len(values) < 3) or not any(None not in pair for pair in pairwise(values)):
        return f'<circle class="fill-{index}" cx="11" cy="5" r="4"/>'
    return f'<line class="line-{index}" x1="0" x2="22" y1="5" y2="5"/>'
