"""report.html of a run and of an evaluation in a real browser.

It draws its curves, makes no network request, executes no program in it, and fits in narrow and wide windows.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.e2e.chromium import chromium_program
from tests.e2e.report_pages import (
    NUM_BATCHES,
    metrics_line,
    sample_line,
    write_compared_runs,
    write_evaluation,
    write_objectives,
    write_rollouts,
    write_run,
)

from nouscoder.domain.batch import GradedRollout
from nouscoder.domain.rollout import Sampling, Task, assemble_rollout
from nouscoder.domain.tokens import Completion, FinishReason, VersionSpan, float32, int32
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.report.page import write_report

if TYPE_CHECKING:
    from nouscoder.learner.metrics.step import TrainedBatch


@dataclass(frozen=True)
class Seen:
    """The result of loading a page: its DOM after its script has run, and the addresses that the page requested."""

    dom: str
    asked: tuple[str, ...]


def browse(page: Path, work: Path) -> Seen:
    """Open the page in headless Chromium. Skips when there is none."""
    net_log = work / f"{page.stem}.net.json"
    command = [
        *(chromium_program(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
        *("--disable-dev-shm-usage", f"--user-data-dir={work / 'profile'}", "--window-size=1280,900"),
        # The proxy does not exist, so the browser's own requests do not leave the machine either.
        *("--proxy-server=127.0.0.1:9", "--proxy-bypass-list=<-loopback>", f"--log-net-log={net_log}"),
        *("--dump-dom", page.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    events = [event.get("params", {}) for event in json.loads(net_log.read_text(encoding="utf8"))["events"]]
    asked = {event["url"] for event in events if event.get("initiator", "not an origin") != "not an origin"}
    return Seen(done.stdout, tuple(sorted(asked)))


class Elements(HTMLParser):
    """Every element's name and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, Mapping[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def count(self, name: str, class_name: str = "") -> int:
        return sum(tag == name and class_name in (attrs.get("class") or "") for tag, attrs in self.found)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    return write_report(folder)


def test_the_page_shows_its_curves_and_neither_uses_the_network_nor_runs_a_program(
    report: Path, tmp_path: Path
) -> None:
    seen = browse(report, tmp_path)
    dom = seen.dom
    assert seen.asked == ()
    elements = Elements(dom)
    assert elements.count("svg", "chart") == 17
    assert elements.count("polyline") >= 13
    assert elements.count("rect", "fill-") >= 4 * NUM_BATCHES
    assert elements.count("article", "pair") == 14
    assert elements.count("svg", "dumbbell") == 45
    # Model output is text: the page has only its own script, no image, and its own title.
    assert elements.count("script") == 1
    assert elements.count("img") == 0
    assert "<title>NousCoder run" in dom
    assert "<title>alive" not in dom


def test_the_policy_of_the_page_blocks_an_injected_script_and_image(report: Path, tmp_path: Path) -> None:
    """As a control: without the policy, both are loaded and detected."""
    slipped = "<script>document.title = 'alive'</script><img src=http://127.0.0.1:9/slipped></body>"
    page = report.read_text(encoding="utf8").replace("</body>", slipped)
    found = []
    for name, text in (("kept", page), ("loose", page.replace('http-equiv="Content-Security-Policy"', ""))):
        (tmp_path / f"{name}.html").write_text(text, encoding="utf8")
        seen = browse(tmp_path / f"{name}.html", tmp_path)
        found.append((seen.asked, "<title>alive" in seen.dom))
    assert found == [((), False), (("http://127.0.0.1:9/slipped",), True)]


def test_curves_react_to_pointer_and_arrow_keys_and_the_table_sorts(report: Path, tmp_path: Path) -> None:
    driver = """<script>
const svg = document.querySelector("svg.chart"), readout = svg.closest("figure").querySelector(".readout");
const box = svg.getBoundingClientRect();
svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width * 0.5, clientY: box.top + 20}));
const seen = [readout.innerText];
svg.dispatchEvent(new KeyboardEvent("keydown", {key: "End"}));
seen.push(readout.innerText);
svg.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowLeft"}));
seen.push(readout.innerText);
svg.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"}));
seen.push(String(readout.hidden));
const table = document.querySelector("table.families");
table.querySelectorAll("button")[2].click();
const rates = [...table.tBodies[0].rows].map((row) => parseFloat(row.cells[2].textContent));
seen.push(String(rates.every((rate, index) => !index || rates[index - 1] <= rate)));
document.body.replaceChildren(Object.assign(document.createElement("pre"), {textContent: seen.join("|")}));
</script>"""
    page = report.read_text(encoding="utf8")
    driven = tmp_path / "driven.html"
    # The page's policy would refuse the driver.
    driven.write_text(
        page.replace('http-equiv="Content-Security-Policy"', "").replace("</body>", driver), encoding="utf8"
    )
    dom = browse(driven, tmp_path).dom
    pointed, at_end, one_left, hidden, is_sorted = dom.split("<pre>")[1].split("</pre>")[0].split("|")
    assert pointed.startswith("step 5")
    assert "rollouts trained on: 0." in pointed
    assert at_end.startswith("step 120\n")
    assert "held-out pass@1: 0." in at_end
    assert one_left.startswith("step 116\n")
    assert (hidden, is_sorted) == ("true", "true")


FITTING = """<script>
function faults(frame) {
  const page = frame.contentDocument, width = page.documentElement.clientWidth, found = [];
  page.querySelectorAll("details").forEach((one) => { one.open = true; });
  if (page.documentElement.scrollWidth > width) found.push("the page scrolls to " + page.documentElement.scrollWidth);
  for (const one of page.body.querySelectorAll("*")) {
    const own = one.parentElement.closest(".scroll, pre, .values");  // these scroll by themselves
    const box = one.getBoundingClientRect(), frameBox = one.closest("figure")?.getBoundingClientRect();
    const [left, right] = frameBox ? [frameBox.left, frameBox.right] : [0, width];
    if (own || !box.width || one.matches(".cursor")) continue;
    if (box.left < left - 0.5 || box.right > right + 0.5) {
      found.push(one.tagName + " " + one.textContent.slice(0, 40) + " from " + box.left + " to " + box.right);
    }
  }
  for (const one of page.querySelectorAll("table.families")) {
    if (one.offsetWidth > one.parentElement.clientWidth) found.push("families of " + one.offsetWidth);
  }
  for (const form of page.querySelectorAll("form.filters")) {
    const before = form.querySelector("output").textContent;
    form.querySelector("select").value = "accepted";
    form.dispatchEvent(new Event("input"));
    const left = [...page.querySelectorAll("details[data-verdict]")].filter((one) => !one.hidden);
    const right = left.length && left.every((one) => one.dataset.verdict === "accepted");
    if (before !== "240 of 240 shown" || !right) found.push("the filter: " + before + ", then " + left.length);
  }
  return frame.title + ": " + (found.join("; ") || "fits");
}
window.addEventListener("load", () => {
  const told = [...document.querySelectorAll("iframe")].map(faults).join("|");
  document.body.replaceChildren(Object.assign(document.createElement("pre"), {textContent: told}));
});
</script>"""


def test_every_page_fits_in_narrow_and_wide_windows(report: Path, tmp_path: Path) -> None:
    """Nothing is cut at 390 and 1280 px: text, labels of charts and open samples are inside the page."""
    pages = {
        "run": report,
        "evaluation": write_evaluation(tmp_path / "evaluation.html"),
        "rollouts": write_rollouts(tmp_path / "run"),
        "objectives": write_objectives(tmp_path / "objectives.html"),
        "comparison": write_compared_runs(tmp_path / "comparison.html"),
    }
    frames = [
        # The page's policy is left out: a frame would pass it on to the driver's script.
        f'<iframe title="{name} {width}" style="width: {width}px; height: 900px; border: 0" srcdoc="'
        + escape(page.read_text(encoding="utf8").replace('http-equiv="Content-Security-Policy"', ""))
        + '"></iframe>'
        for name, page in pages.items()
        for width in (390, 1280)
    ]
    driver = tmp_path / "fitting.html"
    driver.write_text(f"<!doctype html><body>{''.join(frames)}{FITTING}</body>", encoding="utf8")
    told = browse(driver, tmp_path).dom.split("<pre>")[1].split("</pre>")[0].split("|")
    assert told == [f"{name} {width}: fits" for name in pages for width in (390, 1280)]


def test_the_page_of_rollouts_lists_filters_and_colours_and_runs_no_token(tmp_path: Path) -> None:
    page = write_rollouts(tmp_path / "run")
    seen = browse(page, tmp_path)
    assert seen.asked == ()
    assert "<title>alive" not in seen.dom
    elements = Elements(seen.dom)
    assert (elements.count("img"), elements.count("link")) == (0, 0)
    assert elements.count("script") == 2, "its own, and the data"
    assert '<a href="report.html">' in seen.dom
    assert elements.count("span", "clipped") > 3
    assert elements.count("span", "up-") > 10
    assert "32 of 32 shown" in seen.dom
    driver = """<script>
const form = document.querySelector("form.rollout-filters"), seen = [];
const order = [...document.querySelectorAll("table.rollouts tbody tr")].map((row) => Number(row.cells[0].textContent));
const newest = order.every((step, at) => !at || order[at - 1] >= step);
const first = document.querySelector("table.rollouts tbody tr").hasAttribute("aria-current");
const search = form.elements.problem, drawn = document.createElement("canvas").getContext("2d");
drawn.font = getComputedStyle(search).font;
const whole = drawn.measureText(search.placeholder).width <= search.clientWidth - 12;
const verdict = document.querySelector("table.rollouts tbody tr").cells[6];
const looks = [newest, first, whole, getComputedStyle(verdict).textAlign].join();
function told() { return form.querySelector("output").textContent; }
function set(name, value) { form.elements[name].value = value; form.dispatchEvent(new Event("input")); }
set("reward", "0"); seen.push(told());
set("reward", ""); set("version_to", "0"); seen.push(told());
set("version_to", ""); set("tokens", "400"); seen.push(told());
set("tokens", ""); set("verdict", "wrong_answer"); seen.push(told());
set("problem", "LONG_name"); seen.push(told());
set("verdict", ""); set("problem", "");
const rows = [...document.querySelectorAll("table.rollouts tbody tr")];
rows[0].click();
const spans = [...document.querySelectorAll("pre.tokens span.token")];
seen.push(spans.length, spans[0].title.startsWith("ratio "), document.querySelector(".gap").textContent.trim());
set("colours", "versions");
const classes = new Set([...document.querySelectorAll("pre.tokens span.token")].map((one) => one.className.trim()));
seen.push(classes.has("token up-1"));
document.querySelectorAll("table.rollouts button")[4].click();
const sorted = [...document.querySelectorAll("table.rollouts tbody tr")];
const lengths = sorted.map((row) => Number(row.cells[4].textContent));
seen.push(lengths.every((one, at) => !at || lengths[at - 1] <= one));
seen.push(looks);
document.body.replaceChildren(Object.assign(document.createElement("pre"), {textContent: seen.join("|")}));
</script>"""
    driven = tmp_path / "driven.html"
    text = page.read_text(encoding="utf8").replace('http-equiv="Content-Security-Policy"', "")
    driven.write_text(text.replace("</body>", f"{driver}</body>"), encoding="utf8")
    told = browse(driven, tmp_path).dom.split("<pre>")[1].split("</pre>")[0].split("|")
    assert told[:3] == ["16 of 32 shown", "8 of 32 shown", "4 of 32 shown"]
    assert told[3:5] == ["16 of 32 shown", "12 of 32 shown"], "by verdict, then by problem too"
    assert told[5:-1] == ["310", "true", "[100 tokens are left out]", "true", "true"], "of the newest, the first row"
    assert told[-1] == "true,true,true,left"


def test_the_report_of_an_evaluation_is_one_file_that_runs_no_sample(tmp_path: Path) -> None:
    seen = browse(write_evaluation(tmp_path / "evaluation.html"), tmp_path)
    elements = Elements(seen.dom)
    assert seen.asked == ()
    assert "<title>alive" not in seen.dom
    assert (elements.count("script"), elements.count("img"), elements.count("link")) == (1, 0, 0)
    assert elements.count("svg", "chart") == 1
    assert sum("data-verdict" in attributes for _, attributes in elements.found) == 240
    assert "240 of 240 shown" in seen.dom  # the script ran


def test_two_runs_are_overlaid_in_pictures_with_the_names_of_the_figures(tmp_path: Path) -> None:
    """Figures 4 to 8 in a browser: each chart has a line for each run, and the arrow keys read the values of both."""
    page = write_compared_runs(tmp_path / "comparison.html")
    driver = """<script>
const lines = [];
for (const figure of [4, 5, 6, 7, 8]) {
  const section = document.getElementById("figure-" + figure);
  for (const chart of section.querySelectorAll("svg.chart")) {
    const curves = chart.querySelectorAll("polyline").length;
    lines.push(section.querySelector("h2").textContent + ": " + chart.closest("figure").querySelector("h3").textContent
      + ": " + curves + " curves");
  }
}
const svg = document.querySelector("#figure-5 svg.chart");
svg.dispatchEvent(new KeyboardEvent("keydown", {key: "End"}));
lines.push(svg.closest("figure").querySelector(".readout").innerText, svg.querySelectorAll(".whisker").length);
document.body.replaceChildren(Object.assign(document.createElement("pre"), {textContent: lines.join("|")}));
</script>"""
    seen = browse(page, tmp_path)
    assert seen.asked == ()
    assert "<title>alive" not in seen.dom
    driven = tmp_path / "driven.html"
    text = page.read_text(encoding="utf8").replace('http-equiv="Content-Security-Policy"', "")
    driven.write_text(text.replace("</body>", f"{driver}</body>"), encoding="utf8")
    *told, readout, whiskers = browse(driven, tmp_path).dom.split("<pre>")[1].split("</pre>")[0].split("|")
    assert told == [
        *("Figure 4: training reward: reward of trained groups: 2 curves",),
        *("Figure 4: training reward: reward of all groups: 2 curves",),
        *("Figure 5: evaluation: evaluation pass@1: 2 curves",),
        *("Figure 6: response length: response length, in tokens: 2 curves",),
        *("Figure 6: response length: truncated share: 2 curves",),
        *("Figure 7: pass@G and pass@k: training pass@G, trained groups: 2 curves",),
        *("Figure 7: pass@G and pass@k: training pass@G, all groups: 2 curves",),
        *("Figure 7: pass@G and pass@k: evaluation pass@8: 2 curves",),
        *("Figure 8: entropy, clipping and mismatch: entropy, in nats: 2 curves",),
        *("Figure 8: entropy, clipping and mismatch: clip share, low side: 2 curves",),
        *("Figure 8: entropy, clipping and mismatch: clip share, high side: 2 curves",),
        *("Figure 8: entropy, clipping and mismatch: learner to sampler divergence, in nats: 2 curves",),
    ]
    assert readout.split("\n")[0] == "step 120"
    assert readout.count("±") == 2, readout
    assert int(whiskers) == 8


def test_every_chart_has_values_and_samples_have_their_origin(report: Path) -> None:
    page = report.read_text(encoding="utf8")
    for title in (
        *(
            "Evaluations",
            "Solved at least once",
            "Pass rate",
            "Reward",
            "Staleness, in versions",
            "Response length, in tokens",
            "Overlong rollouts",
            "Entropy, in nats",
            "Importance ratio",
        ),
        *(
            "Clip fraction",
            "Learner to sampler ratio",
            "Learner to sampler divergence, in nats",
            "Effective sample size",
        ),
        *("Gradient norm", "Loss", "Learner throughput", "Where the learner&#x27;s time went"),
    ):
        assert f"<h3>{title}</h3>" in page
    assert "step 1 · sum_plus-3 · reward -1 · policy version 1 to 3 · staleness 2<" in page


def test_the_learner_writes_the_lines_that_this_report_reads() -> None:
    """The keys in these tests are those that the learner writes, so every chart has a written key."""
    from nouscoder.learner.state.run_log import BatchSeconds, metrics_lines, sample_lines

    trained = trained_batch()
    (line,) = metrics_lines(trained, 1, BatchSeconds())
    ours = metrics_line(1, random.Random(0))
    assert set(line) == set(ours)
    assert set(line["seconds"]) == set(ours["seconds"])
    (sample,) = sample_lines(trained, lambda ids: "".join(map(chr, ids)), 1, 0)
    assert set(sample) == set(sample_line(1, ""))
    assert (sample["version_range"], sample["program"]) == ([0, 1], "print(1)")


def trained_batch() -> TrainedBatch:
    """A batch of one rollout and one step, made from the learner's records."""
    import torch

    from nouscoder.learner.metrics.diagnostics import StepDiagnostics
    from nouscoder.learner.metrics.step import StepMetrics, TrainedBatch
    from nouscoder.learner.scoring import ScoredRollout, statistics_of
    from nouscoder.objectives.base import LossInputs, MinibatchCounts
    from nouscoder.objectives.dapo import Dapo
    from nouscoder.objectives.loss import SurrogateLoss

    text = "print(1)"
    spans = (VersionSpan(0, 3), VersionSpan(1, 5))
    completion = Completion(int32(map(ord, text)), float32([-0.1] * 8), spans, FinishReason.STOP)
    rollout = assemble_rollout(Task("r", "g", "p", "", Sampling()), [int32([1]), completion], text)
    graded = GradedRollout(rollout, Verdict(VerdictKind.ACCEPTED, 10, 10, 10, 0.1, "local"), 1.0)
    scored = (ScoredRollout(graded, 0.5, 1),)
    tokens = torch.full((8,), -0.1)
    ones, numbers = torch.ones(8), torch.zeros(8).long()
    inputs = LossInputs(
        tokens, tokens, tokens, ones, numbers, ones, ones.bool(), num_versions=numbers + rollout.num_versions
    )
    diagnostics = StepDiagnostics()
    diagnostics.add(inputs, SurrogateLoss(Dapo())(inputs, MinibatchCounts(8, 1, 8)).diagnostics)
    step = StepMetrics(1, False, 0.0, 1.0, 3e-4, 8, 9, 0.5, diagnostics.result())
    return TrainedBatch(1, (step,), scored, statistics_of(scored), 0.6)
