"""The report without a browser: what it reads and draws, and that no content of a run folder breaks it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.recorded_evaluations import EvaluatedSample
from nouscoder.report.charts import Chart, Series, dumbbell, format_number, line_chart, nice_ticks, share_chart, table
from nouscoder.report.curves import Drawn, by_batch, figure, time_chart
from nouscoder.report.markup import MAX_CHARACTERS, clip, escape
from nouscoder.report.page import NothingToReport, write_report
from nouscoder.report.run_data import EvaluationData, number, read_run
from nouscoder.report.samples import Change, chosen, pairs

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&lt;\u202e\x00\ud800$policy ${script}"
SUMMARY = {
    "name": "demo",
    "seed": 2,
    "steps": 120,
    "pass_at_1_before": 0.25,
    "pass_at_1_after": 0.75,
    "learning_seconds": 254.3,
    "ledger": {
        "admitted": 10,
        "trained": 4,
        "filtered": 3,
        "stale": 1,
        "abandoned": 0,
        "lost": 0,
        "in_flight": {"ready": 2},
    },
    "balanced": True,
}


def page_of(folder: Path, **contents: Any) -> str:
    """The page of a folder with these files: a string is the text, a list gives lines, other values give JSON."""
    names = {"metrics": "metrics.jsonl", "samples": "samples.jsonl"}
    for name, content in contents.items():
        if isinstance(content, list):
            content = "".join(json.dumps(line) + "\n" for line in content)
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / names.get(name, f"{name}.json")).write_text(text, encoding="utf8", errors="surrogatepass")
    return write_report(folder).read_text(encoding="utf8")


def samples_of(*verdicts: str, family: str = "sums") -> list[dict[str, str]]:
    return [
        {
            "problem_id": f"{family}-{index}",
            "family": family,
            "prompt": "p",
            "program": f"print({index})",
            "verdict": verdict,
        }
        for index, verdict in enumerate(verdicts)
    ]


def evaluation_of(samples: list[dict[str, str]]) -> EvaluationData:
    return EvaluationData(None, None, None, None, {}, tuple(EvaluatedSample(**sample) for sample in samples))


class Structure(HTMLParser):
    """Checks that elements are nested correctly, and collects them and all visible text."""

    VOID = ("meta", "line", "rect", "circle", "polyline")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[str] = []
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes.update(name for name, _ in attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes.update(name for name, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_headline_shows_the_result_and_the_ledger(tmp_path: Path) -> None:
    text = " ".join("".join(Structure(page_of(tmp_path, summary=SUMMARY)).texts).split())
    assert "0.250 → 0.750" in text
    assert "+0.500" in text
    assert "4 min 14 s" in text
    assert (
        "✓ balanced admitted 10 = trained 4 + filtered 3 + stale 1 + abandoned 0 + lost 0 + in flight 2 (ready 2)"
        in text
    )


@pytest.mark.parametrize("change", [{"balanced": False}, {"ledger": {**SUMMARY["ledger"], "admitted": 11}}])  # type: ignore[dict-item]
def test_a_ledger_is_shown_as_balanced_only_if_the_summary_says_so_and_it_adds_up(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    page = page_of(tmp_path, summary={**SUMMARY, **change})
    assert "NOT BALANCED" in page
    assert "✓ balanced" not in page


def test_a_run_that_trained_nothing_says_so_and_gets_no_empty_page(tmp_path: Path) -> None:
    with pytest.raises(NothingToReport, match="has trained nothing and evaluated nothing yet, so it has no report"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())
    page = page_of(tmp_path, evaluation_before={"policy_version": 0, "pass_at_1": 0.5, "samples": []})
    assert "This run has trained nothing yet, so it has no curves; it has not ended." in page
    assert Structure(page).open == []
    assert not list(tmp_path.rglob("*.part"))


def test_a_missing_run_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere is not a run folder"):
        write_report(tmp_path / "nowhere")


def test_incomplete_lines_are_counted_and_broken_files_are_named(tmp_path: Path) -> None:
    lines = '{"step": 1, "batch_id": 0, "loss": 0.5}\n{"step": 2, "loss"\n[3]\n{"step": NaN}\n'
    page = page_of(tmp_path, metrics=lines, summary="{", evaluation_before="[]", evaluation_after={"samples": 7})
    assert "2 lines of metrics.jsonl and samples.jsonl could not be read" in page
    assert "summary.json could not be read. evaluation_before.json could not be read." in page
    assert Structure(page).elements.count("figure") == 1  # the one loss that is there


def test_of_a_step_written_twice_the_last_line_counts(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": loss} for step, loss in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.9))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert [(line["step"], line["loss"]) for line in read_run(tmp_path).metrics] == [(1, 0.1), (2, 0.9), (3, 0.3)]


@pytest.mark.parametrize("value", [math.nan, math.inf, "3", True, None, [1], 10**400])
def test_values_other_than_finite_numbers_are_none(value: object) -> None:
    assert number({"a": value}, "a") is None
    assert number({"a": value, "b": 2}, "a", "b") == 2


def test_languages_are_shown_where_there_are_several(tmp_path: Path) -> None:
    def shown(rates: dict[str, float]) -> str:
        return page_of(tmp_path, summary=SUMMARY, evaluation_before={"pass_at_1": 0.5, "by_language": rates})

    assert "Held-out pass@1 by language" in shown({"cpp": 0.25, "python": 0.75})
    assert "by language" not in shown({"python": 0.5})


def test_hostile_text_adds_no_element_and_no_attribute(tmp_path: Path) -> None:
    def build(text: str) -> Structure:
        evaluation = {
            "pass_at_1": 0.5,
            "by_family": {text: 0.5},
            "by_language": {text: 0.5, "cpp": 0.25},
            "samples": [{"problem_id": text, "family": text, "prompt": text, "program": text, "verdict": text}],
        }
        sample = {"step": 1, "problem_id": text, "prompt": text, "program": text, "verdict": text}
        summary = {**SUMMARY, "name": text, "ledger": {**SUMMARY["ledger"], "in_flight": {text: 2}}}  # type: ignore[dict-item]
        return Structure(
            page_of(
                *(tmp_path,),
                summary=summary,
                samples=[sample],
                evaluation_before=evaluation,
                evaluation_after=evaluation,
                metrics=[{"step": 1, "loss": 1.0, "pass_rate": text}],
            )
        )

    tame, hostile = build("x"), build(HOSTILE)
    assert hostile.elements == tame.elements
    assert hostile.attributes == tame.attributes
    assert not {"src", "onerror", "style"} & hostile.attributes
    shown = "".join(hostile.texts)
    assert shown.count("</script><script>alert(1)</script>") >= 10
    assert "\\u202e\\u0000\\ud800$policy ${script}" in shown


@given(st.text(st.characters(codec=None, categories=None)))
def test_escaped_text_is_one_text_node_and_can_be_encoded(text: str) -> None:
    parsed = Structure(f"<pre>{escape(text)}</pre>")
    assert parsed.elements == ["pre"]
    escape(text).encode("utf8")
    assert not re.search("[<>\"'\u202a-\u202e\u2066-\u2069\x00-\x08]", escape(text))


def test_a_long_program_is_clipped_with_a_note() -> None:
    assert clip("a" * MAX_CHARACTERS) == "a" * MAX_CHARACTERS
    assert clip("a" * (MAX_CHARACTERS + 5)).endswith("a\n[5 more characters]")


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
def test_ticks_are_even_few_and_enclose_the_values(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    ticks = nice_ticks(low, high)
    span = ticks[-1] - ticks[0]
    assert span > 0
    assert ticks[0] <= min(max(low, -1e200), 1e200) + 1e-6 * span
    assert ticks[-1] >= max(min(high, 1e200), -1e200) - 1e-6 * span
    assert 2 <= len(ticks) <= 8
    steps = [right - left for left, right in pairwise(ticks)]
    assert max(steps) - min(steps) <= 1e-4 * span


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0, "0"),
        (1, "1"),
        (-0.25, "-0.25"),
        (0.12345, "0.1235"),
        (8211.4, "8\u2009211"),
        (1e-5, "1.00e-05"),
    ],
)
def test_numbers_are_shown_with_few_digits(value: float | None, shown: str) -> None:
    assert format_number(value) == shown


def test_a_line_has_a_gap_at_a_missing_value_and_its_points_are_right() -> None:
    series = Series("loss", (0.0, 1.0, None, 0.5, None, 1.0, 0.0))
    svg = line_chart(Chart("t", "step", tuple(map(float, range(1, 8))), (series,), low=0, high=1))
    assert svg.count("<polyline") == 2
    assert svg.count("<circle") == 1
    points = re.findall(r'points="([^"]*)"', svg)[0].split()
    assert points == ["52.0,206.0", "134.3,12.0"]  # the left edge at the bottom, then the top


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.none(), min_size=1, max_size=5))
def test_any_finite_values_can_be_drawn_inside_the_frame(values: list[float | None]) -> None:
    xs = tuple(map(float, range(len(values))))
    chart = Chart("t", "step", xs, (Series("a", tuple(values)),))
    lines = line_chart(chart)
    for svg in (lines, share_chart(chart)):
        assert "nan" not in svg
        assert "inf" not in svg
    for point in " ".join(re.findall(r'points="([^"]*)"', lines)).split():
        x, y = map(float, point.split(","))
        assert 52 <= x <= 546
        assert 12 <= y <= 206


def test_charts_without_values_are_empty() -> None:
    nothing = Chart("t", "step", (1.0, 2.0), (Series("a", (None, None)),))
    assert line_chart(nothing) == ""
    assert share_chart(nothing) == ""


def test_shares_fill_each_bar_and_are_in_proportion() -> None:
    chart = Chart("t", "batch", (0.0, 1.0), (Series("a", (3.0, 0.0)), Series("b", (1.0, None))))
    heights = [float(height) for height in re.findall(r'<rect [^>]*height="([\d.]+)"', share_chart(chart))]
    assert len(heights) == 2
    assert heights[0] / heights[1] == pytest.approx(3, rel=0.05)
    assert sum(heights) == pytest.approx(194, abs=2)


def test_values_are_visible_without_a_script() -> None:
    chart = Chart("t", "step", (1.0, 2.0), (Series("a<b", (0.5, None)),))
    assert '<th scope="col">a&lt;b</th>' in table(chart)
    assert '<tr><th scope="row">2</th><td>-</td></tr>' in table(chart)


def test_a_dumbbell_shows_gain_or_loss() -> None:
    assert "change gain" in dumbbell(0.2, 0.8)
    assert "change loss" in dumbbell(0.8, 0.2)
    assert "change" not in dumbbell(None, 0.2)


def test_the_seconds_of_a_batch_are_the_sum_over_its_steps() -> None:
    lines = [
        {"step": 1, "batch_id": 0, "seconds": {"train": 1.0, "wait_for_batch": 2.0}},
        {"step": 2, "batch_id": 0, "seconds": {"train": 3.0, "wait_for_batch": 0.0, "publish": 0.5}},
        {"step": 3, "batch_id": 1, "seconds": {"train": 5.0}},
    ]
    shown = {series.name: series.values for series in time_chart(by_batch(lines)).series}
    assert shown["training"] == (4.0, 5.0)
    assert shown["waiting for a batch"] == (2.0, None)
    assert shown["publishing"] == (0.5, None)


def test_rollouts_before_and_after_are_paired_by_problem_and_counted_by_change(tmp_path: Path) -> None:
    before = samples_of("runtime_error", "accepted", "accepted", "wrong_answer")
    after = list(reversed(samples_of("accepted", "accepted", "wrong_answer", "no_code")))
    found = pairs(evaluation_of(before), evaluation_of(after))
    assert [pair.change for pair in found] == [Change.GAINED, Change.KEPT, Change.LOST, Change.STILL_FAILING]
    assert all(pair.before.problem_id == pair.after.problem_id for pair in found)
    page = page_of(tmp_path, evaluation_before={"samples": before}, evaluation_after={"samples": after})
    assert "Of 4 held-out problems, by the first rollout of each: 1 gained, 1 kept, 1 lost, 1 still failing." in page


def test_the_pairs_shown_are_of_different_families_first() -> None:
    before = [sample for name in "abcdefgh" for sample in samples_of("no_code", "no_code", family=name)]
    after = [sample for name in "abcdefgh" for sample in samples_of("accepted", "accepted", family=name)]
    shown = chosen(pairs(evaluation_of(before), evaluation_of(after)))
    assert [pair.before.family for pair in shown] == list("abcdef")


def test_missing_figures_of_families_are_computed_from_the_samples(tmp_path: Path) -> None:
    before, after = samples_of("no_code", "accepted"), samples_of("accepted", "accepted")
    page = page_of(tmp_path, evaluation_before={"samples": before}, evaluation_after={"samples": after})
    assert '<th scope="row">sums</th><td>0.50</td><td>1.00</td><td>+0.50</td>' in page


def labels_of(svg: str) -> list[str]:
    """What stands below the horizontal axis, without its name."""
    return re.findall(r'y="221" text-anchor="middle">([^<]*)<', svg)


@pytest.mark.parametrize(
    ("steps", "labels"),
    [
        (range(2, 161, 2), "20 40 60 80 100 120 140 160"),
        (range(1, 4), "1 2 3"),
        ([5], "5"),
        (range(47), "0 10 20 30 40"),
        (range(1, 250_001, 1000), "50000 100000 150000 200000 250000"),
    ],
)
def test_ticks_of_the_steps_are_round(steps: Sequence[int], labels: str) -> None:
    xs = tuple(map(float, steps))
    series = (Series("a", tuple(1.0 for _ in xs)),)
    for svg in (line_chart(Chart("t", "step", xs, series)), share_chart(Chart("t", "batch", xs, series))):
        assert labels_of(svg) == [one for one in labels.split() if float(one) <= xs[-1]]


def test_few_values_are_dots_and_two_of_them_are_no_line() -> None:
    """An evaluation before a run and one after it do not say how the run went between them."""
    two, three = ((0.2, None, 0.8), (0.2, 0.3, 0.8))
    for values, dots, lines in ((two, 2, 0), (three, 3, 1)):
        chart = Chart("t", "step", (0.0, 80.0, 160.0), (Series("a", values, joined=True),))
        svg = line_chart(chart)
        assert (svg.count("<circle"), svg.count("<polyline")) == (dots, lines)
        assert ("<circle" in figure(Drawn(chart, "")).partition("</figcaption>")[0]) == (not lines), "the legend"


def test_an_outlier_gets_a_logarithmic_axis_which_is_named() -> None:
    steps = tuple(map(float, range(1, 101)))
    wide = Chart("Ratio", "step", steps, (Series("max", (*([1.5] * 50), 120.0, *([1.6] * 49))),))
    svg = line_chart(wide)
    heights = [float(point.split(",")[1]) for point in re.findall(r'points="([^"]*)"', svg)[0].split()]
    assert max(heights) - min(heights) > 120
    assert heights[0] - heights[-1] > 1.5, "the other values are told apart"
    assert ">100</text>" in svg
    assert "Ratio, log axis" in figure(Drawn(wide, svg))
    for values in ((1.5, 1.6, 9.0), (0.0, 1.5, 120.0), (-1.0, 1.5, 120.0), (1e-13, 1.5, 120.0)):
        even = Chart("Ratio", "step", (1.0, 2.0, 3.0), (Series("max", values),))
        assert "log axis" not in figure(Drawn(even, line_chart(even)))


def test_units_are_said_and_a_value_has_the_digits_of_its_error() -> None:
    chart = Chart("Response length", "step", (1.0, 2.0), (Series("a", (31.0, 44.0)),), " tokens")
    assert "<h3>Response length, in tokens</h3>" in figure(Drawn(chart, line_chart(chart)))
    errors = {0.06504: "0.65 ± 0.07", 0.0149: "0.654 ± 0.015", 0.0: "0.6544 ± 0", 12.3: "1 ± 12"}
    for error, shown in errors.items():
        assert Series("a", (0.6544,), (error,)).text(0) == shown


def test_seconds_of_the_learner_have_no_digits_below_a_millisecond() -> None:
    metrics = [{"step": 1, "batch_id": 0, "seconds": {"train": 2.0, "publish": 1.82e-5}}]
    assert "e-" not in table(time_chart(by_batch(metrics)))


CONFIG = """[policy]
path = "<b>"
[problems]
train = "p/train.jsonl"
held_out_share = 0.1
[learner]
learning_rate = 0.0003
[learner.objective]
name = "dapo"
"""


def test_the_report_says_what_was_run(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    (tmp_path / "<b>").mkdir()
    (tmp_path / "<b>" / "config.json").write_text('{"model_type": "qwen3"}')
    lines = [{"step": step, "batch_id": step, "time": 1.7e9 + 60 * step} for step in range(3)]
    page = page_of(tmp_path, summary={**SUMMARY, "version": "0.1.0"}, metrics=lines)
    text = " ".join("".join(Structure(page).texts).split())
    for part in (
        "model <b> (qwen3)",
        "data p/train.jsonl",
        "objective dapo",
        "learning rate 0.0003",
        "NousCoder 0.1.0",
    ):
        assert part in text
    assert "first step 2023-11-14 22:13 UTC" in text
    assert '<a href="config.toml">' in page
    (tmp_path / "config.toml").write_text("[")
    assert "config.toml could not be read." in page_of(tmp_path, summary=SUMMARY)
