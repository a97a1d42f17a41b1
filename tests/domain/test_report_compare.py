"""Curves of evaluations, and two runs on one page: what is drawn, under which name, and what is said of wrong input."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nouscoder.cli.app import app
from nouscoder.errors import NousCoderError
from nouscoder.report.charts import Chart, Series, line_chart
from nouscoder.report.compare import write_comparison
from nouscoder.report.page import write_report
from nouscoder.report.run_data import NotARun, read_run

DOCUMENT = Path(__file__).parents[2] / "docs" / "reports.md"
FIGURES = {
    "figure-4": ("reward of trained groups", "reward of all groups"),
    "figure-5": ("evaluation pass@1",),
    "figure-6": ("response length, in tokens", "truncated share"),
    "figure-7": ("training pass@G, trained groups", "training pass@G, all groups", "evaluation pass@8"),
    "figure-8": (
        "entropy, in nats",
        "clip share, low side",
        "clip share, high side",
        "learner to sampler divergence, in nats",
    ),
}


def evaluation(version: int, rate: float, **more: Any) -> dict[str, Any]:
    return {"policy_version": version, "pass_at_1": rate, "standard_error": 0.04, "num_problems": 50, **more}


def line(step: int, offset: float) -> dict[str, Any]:
    return {
        "step": step,
        "batch_id": (step - 1) // 2,
        "policy_version": (step + 1) // 2,
        "reward_mean": 0.1 + offset,
        "pass_at_g": 1.0,
        "all_groups": {"groups": 9, "reward_mean": -0.5 + offset, "pass_rate": 0.25, "pass_at_g": 0.75},
        "response_length": 100 + step,
        "overlong_share": 0.25,
        "entropy": 0.5,
        "clip_fraction_low": 0.01,
        "clip_fraction_high": 0.02,
        "mismatch_kl": 0.003,
    }


def write_run(
    folder: Path, offset: float = 0.0, evaluations: Mapping[int, float] | None = None, steps: int = 8
) -> Path:
    """A run of two steps a batch; evaluations by version, 16 samples a problem."""
    (folder / "evaluations").mkdir(parents=True)
    lines = [json.dumps(line(step, offset)) + "\n" for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    for version, rate in (evaluations or {}).items():
        more = {"16": rate + 0.3} if version == 0 else {}
        record = evaluation(version, rate, pass_at_k={"1": rate, "8": rate + 0.2, **more})
        name = "evaluation_before.json" if version == 0 else f"evaluations/{version:08d}.json"
        (folder / name).write_text(json.dumps(record))
    return folder


class Page(HTMLParser):
    """The pictures of a page: their names by section, the values of each chart, the text where a chart is missing."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.charts: dict[str, list[str]] = {}
        self.data: dict[str, Any] = {}
        self.empty: dict[str, str] = {}
        self._section = self._title = self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self._tag = f"{tag}.{found.get('class') or ''}"
        if tag == "section":
            self._section = found.get("id") or ""
        if tag == "svg" and found.get("class") == "chart":
            self.data[self._title] = json.loads(found["data-chart"] or "")

    def handle_data(self, data: str) -> None:
        if self._tag == "h3.":
            self._title = data
            self.charts.setdefault(self._section, []).append(data)
        if self._tag == "p.empty":
            self.empty[self._title] = data
        self._tag = ""


def compared(tmp_path: Path, *runs: Path) -> Page:
    return Page(write_comparison(tmp_path / "compared.html", runs).read_text(encoding="utf8"))


def values(page: Page, chart: str, run: str) -> dict[float, str]:
    """The values of a run in a chart, by step, where it has one."""
    data = page.data[chart]
    (series,) = (one for one in data["series"] if one["name"] == run)
    return {x: value for x, value in zip(data["xs"], series["values"], strict=True) if value != "-"}


def test_two_runs_are_overlaid_in_every_named_figure(tmp_path: Path) -> None:
    one = write_run(tmp_path / "dapo", evaluations={0: 0.3, 2: 0.4, 4: 0.5})
    two = write_run(tmp_path / "gspo", 0.25, {0: 0.3, 3: 0.625}, steps=6)
    page = compared(tmp_path, one, two)
    assert {name: tuple(page.charts[name]) for name in FIGURES} == FIGURES
    assert all([one["name"] for one in data["series"]] == ["dapo", "gspo"] for data in page.data.values())
    assert page.empty == {}
    assert values(page, "reward of trained groups", "gspo") == dict.fromkeys((2, 4, 6), "0.35")
    assert values(page, "reward of all groups", "dapo") == dict.fromkeys((2, 4, 6, 8), "-0.5")
    # An evaluation stands at the last step of the batch that made its version.
    assert values(page, "evaluation pass@1", "dapo") == {0: "0.30 ± 0.04", 4: "0.40 ± 0.04", 8: "0.50 ± 0.04"}
    assert values(page, "evaluation pass@1", "gspo") == {0: "0.30 ± 0.04", 6: "0.62 ± 0.04"}
    assert values(page, "evaluation pass@8", "gspo") == {0: "0.5", 6: "0.825"}
    assert values(page, "truncated share", "dapo")[8] == "0.25"


def test_the_table_has_first_last_and_best_of_each_run(tmp_path: Path) -> None:
    one = write_run(tmp_path / "dapo", evaluations={0: 0.3, 2: 0.75, 4: 0.5})
    text = write_comparison(tmp_path / "c.html", [one, write_run(tmp_path / "gspo")]).read_text(encoding="utf8")
    row = text.split('<th scope="row">dapo</th>')[1].split("</tr>")[0]
    assert [cell.split("<")[0] for cell in row.split("<td>")[1:]] == [
        "8",
        "0.30 ± 0.04",
        "0.50 ± 0.04",
        "0.75 ± 0.04",
        "4",
        "0.7",
    ]
    row = text.split('<th scope="row">gspo</th>')[1].split("</tr>")[0]
    assert [cell.split("<")[0] for cell in row.split("<td>")[1:]] == ["8", "-", "-", "-", "-", "-"]


def test_the_best_evaluation_is_the_first_of_those_that_differ_by_rounding_alone(tmp_path: Path) -> None:
    one = write_run(tmp_path / "dapo", evaluations={0: 0.1, 2: 0.3, 4: 0.1 + 0.2})
    text = write_comparison(tmp_path / "c.html", [one, write_run(tmp_path / "gspo")]).read_text(encoding="utf8")
    row = text.split('<th scope="row">dapo</th>')[1].split("</tr>")[0]
    assert row.split("<td>")[5].split("<")[0] == "4"


def test_runs_without_evaluations_get_an_empty_picture_that_says_why(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "dapo"), write_run(tmp_path / "gspo")
    page = compared(tmp_path, one, two)
    assert {name: tuple(page.charts[name]) for name in FIGURES} | {"figure-7": ()} == FIGURES | {"figure-7": ()}
    assert list(page.empty) == ["evaluation pass@1", "evaluation pass@k"]
    assert page.empty["evaluation pass@1"].startswith("No run has an evaluation")
    # One of two has it: the picture says which one has not.
    three = write_run(tmp_path / "gppo", evaluations={0: 0.3})
    text = write_comparison(tmp_path / "c.html", [one, three]).read_text(encoding="utf8")
    assert "Not in: dapo." in text


def test_an_older_run_without_the_new_fields_is_drawn_as_far_as_it_goes(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "metrics.jsonl").write_text('{"step": 1, "batch_id": 0, "reward_mean": 0.5}\n')
    (old / "evaluation_before.json").write_text('{"pass_at_1": 0.25, "policy_version": 0}')
    page = compared(tmp_path, old, write_run(tmp_path / "new", evaluations={0: 0.5}))
    assert values(page, "evaluation pass@16", "new") == {0: "0.8"}, "also where the other run has one sample a problem"
    assert values(page, "evaluation pass@16", "old") == {}
    assert values(page, "reward of trained groups", "old") == {1: "0.5"}
    assert values(page, "evaluation pass@1", "old") == {0: "0.25"}
    assert "old" in [one["name"] for one in page.data["reward of all groups"]["series"]]


def test_wrong_input_is_one_sentence(tmp_path: Path) -> None:
    run, empty, plan = write_run(tmp_path / "dapo"), tmp_path / "empty", tmp_path / "staged"
    empty.mkdir()
    write_run(plan / "01-short")
    (plan / "plan.json").write_text("{}")
    cases = {
        (run, empty): f"{empty} is not a run folder: it has neither config.toml nor metrics.jsonl",
        (run, tmp_path / "nowhere"): f"there is no folder {tmp_path / 'nowhere'}",
        (run, run): f"{run} is given twice",
        (run, tmp_path / "." / "dapo" / ".." / "dapo"): f"{tmp_path}/dapo/../dapo is given twice",
        (run,): "a comparison needs two runs or more",
        (run, plan): f"{plan} is the folder of a plan: name one of its stages, such as {plan / '01-short'}",
        tuple(tmp_path / f"r{i}" for i in range(9)): "a comparison shows at most 8 runs, not 9",
    }
    for runs, sentence in cases.items():
        with pytest.raises(NousCoderError) as raised:
            write_comparison(tmp_path / "c.html", runs)
        assert str(raised.value) == sentence
    assert not (tmp_path / "c.html").exists()


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "a" / "demo"), write_run(tmp_path / "b" / "demo")
    page = compared(tmp_path, one, two)
    assert [series["name"] for series in page.data["entropy, in nats"]["series"]] == [str(one), str(two)]


def test_the_commands_write_the_pages_and_say_where(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "dapo"), write_run(tmp_path / "gspo")
    run = CliRunner()
    answer = run.invoke(app, ["report", "compare", str(one), str(two), "--to", str(tmp_path / "c.html")])
    assert (answer.exit_code, answer.output.strip()) == (0, f"the comparison is in {tmp_path / 'c.html'}")
    answer = run.invoke(app, ["report", str(one)])
    assert (answer.exit_code, answer.output.strip()) == (0, f"the report is in {one / 'report.html'}")
    assert (one / "report.html").is_file()
    wrong = run.invoke(app, ["report", str(tmp_path)])
    assert isinstance(wrong.exception, NotARun)
    plan = tmp_path / "plan"
    write_run(plan / "01-short")
    (plan / "config.toml").write_text("")
    (plan / "plan.json").write_text("{}")
    for command in (["report", str(plan)], ["report", "compare", str(plan), str(one)]):
        wrong = run.invoke(app, command)
        assert "folder of a plan: name one of its stages, such as" in str(wrong.exception), "it was an empty page"


def test_the_commands_of_the_document_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    for seed in (0, 1):
        write_run(tmp_path / "runs" / f"demo-{seed}", evaluations={0: 0.3})
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```sh tested\n(.*?)^```", DOCUMENT.read_text(encoding="utf8"), re.DOTALL | re.MULTILINE)
    commands = block.splitlines()
    assert len(commands) == 2
    for command in commands:
        program, *words = command.split()
        answer = CliRunner().invoke(app, words)
        assert (program, answer.exit_code) == ("nouscoder", 0), answer.output
    assert Path("comparison.html").is_file()


def test_the_document_has_the_sections_of_the_page(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("dapo", "gspo")]
    page = write_comparison(tmp_path / "c.html", runs).read_text(encoding="utf8")
    rows = [row.split("|")[1].strip() for row in DOCUMENT.read_text(encoding="utf8").splitlines() if "| Figure" in row]
    assert re.findall("<h2>(Figure [^<]*)</h2>", page) == rows


# ---- report.html of one run ----


def test_the_report_of_a_run_has_the_curve_of_its_evaluations(tmp_path: Path) -> None:
    run = write_run(tmp_path / "dapo", evaluations={0: 0.3, 2: 0.4})
    after = evaluation(4, 0.5, pass_at_k={"1": 0.5, "8": 0.7})
    (run / "evaluation_after.json").write_text(json.dumps(after))
    page = Page(write_report(run).read_text(encoding="utf8"))
    shown = "held-out pass@1"
    assert values(page, "Evaluations", shown) == {0: "0.30 ± 0.04", 4: "0.40 ± 0.04", 8: "0.50 ± 0.04"}
    assert values(page, "Pass rate", shown) == {0: "0.3", 4: "0.4", 8: "0.5"}
    assert values(page, "Pass rate", "all groups") == dict.fromkeys((2, 4, 6, 8), "0.25")
    assert values(page, "Reward", "all groups") == dict.fromkeys((2, 4, 6, 8), "-0.5")
    assert values(page, "Solved at least once", "trained groups (pass@G)")[8] == "1"
    assert values(page, "Solved at least once", "all groups (pass@G)")[8] == "0.75"
    assert values(page, "Solved at least once", "held-out pass@8") == {0: "0.5", 4: "0.6", 8: "0.7"}


def test_an_evaluation_that_is_damaged_is_named_and_the_others_are_drawn(tmp_path: Path) -> None:
    run = write_run(tmp_path / "dapo", evaluations={0: 0.3, 2: 0.4})
    (run / "evaluations" / "00000003.json").write_text("{")
    (run / "evaluations" / "notes.txt").write_text("{")
    data = read_run(run)
    assert [one.policy_version for one in data.evaluations] == [0, 2]
    assert data.unreadable_files == ("00000003.json",)


def test_a_curve_that_is_always_zero_lies_on_the_lower_edge() -> None:
    svg = line_chart(Chart("t", "step", (1.0, 2.0), (Series("a", (0.0, 0.0)),), low=0))
    assert 'points="52.0,206.0 546.0,206.0"' in svg


def test_whiskers_are_drawn_inside_the_frame_and_a_joined_series_has_no_gap() -> None:
    series = Series("a", (0.0, None, 1.0, 1.0), errors=(0.5, None, None, None), joined=True)
    svg = line_chart(Chart("t", "step", (0.0, 1.0, 2.0, 3.0), (series,), low=0, high=1))
    assert svg.count("<polyline") == 1
    assert svg.count('class="whisker') == 1
    assert 'y1="109.0" y2="206.0"' in svg, "from 0.5 down to the lower edge"
