"""The live console in a real browser: it follows a run, two runs lie over each other, and it comes back by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.axe import axe_script, violations_on
from tests.e2e.chromium import Chromium, asked, chromium_program, troubles
from tests.e2e.report_pages import HOSTILE, write_compared_runs, write_lines, write_rollouts
from tests.npm_package import NpmPackage
from tests.services.test_console_follow import lines_of

from nouscoder.domain.run_status import Ledger
from nouscoder.run.console import events as told
from nouscoder.run.console.feed import Feed
from nouscoder.run.pages import open_pages
from nouscoder.run.snapshot import ProcessLine, Snapshot

LEDGER = Ledger(100, 60, 20, 0, 0, {"queued": 4, "sampling": 16})
UPLOT = NpmPackage(
    name="uplot",
    version="1.6.32",
    sha256="4b8a8191e425658e3ea8c8c1314b0fc679c861ee3a1af2b20c7b16ba50b5133d",
    folder_name="uplot",
    files=("dist/uPlot.iife.min.js", "dist/uPlot.min.css", "LICENSE"),
)
SHOWN = "document.querySelectorAll('canvas').length > 10"


def snapshot(step: int, *blockers: str) -> Snapshot:
    processes = (ProcessLine("broker", "running", 12), ProcessLine("learner", "restarting", None, 2))
    figures: dict[str, Any] = {"pass_rate": 0.5, "ledger": LEDGER, "processes": processes, "blockers": blockers}
    return Snapshot("learning", step // 4, 40, step, 160, **figures)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that goes on after 120 steps, with hostile texts, beside another run with a hostile name."""
    write_compared_runs(tmp_path / "page.html")
    write_rollouts(tmp_path / "one")
    (tmp_path / "one" / "summary.json").unlink()
    return tmp_path / "one"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    browser = Chromium(chromium_program(), tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told, "TICK_S", 0.05)


def look(browser: Chromium, address: str, width: int = 1280, scheme: str = "light") -> None:
    """Open the console, and look at its rollouts."""
    browser.events.clear()
    size: dict[str, Any] = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.open(f"http://{address}/", SHOWN)
    browser.ask("Emulation.setDeviceMetricsOverride", **size)
    browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.value("document.getElementById('browser').scrollIntoView()")
    browser.until("document.querySelectorAll('.token').length > 20")


def words(id_: str) -> str:
    return f"document.getElementById('{id_}').innerText"


def last_loss(browser: Chromium) -> str:
    """What the legend of the last chart says, which has a point for each step."""
    legend = "[...document.querySelectorAll('#charts figure')].pop().querySelector('.legend b').textContent"
    return str(browser.value(legend))


def test_the_page_follows_a_run_and_its_end_and_comes_back_after_a_restart(run: Path, browser: Chromium) -> None:
    feed = Feed()
    feed.show(snapshot(120, f"No learner runs. {HOSTILE}"))
    feed.say(HOSTILE)
    there = lines_of(120)
    write_lines(run / "metrics.jsonl", there)
    with open_pages(run, "127.0.0.1:0", feed=feed) as address:
        look(browser, address)
        assert "No learner runs." in browser.value(words("blockers"))
        assert "✓ balanced admitted 100 = trained 60 + filtered 20" in browser.value(words("ledger"))
        assert "learner restarting restarted 2x" in browser.value(words("processes"))
        browser.until(f"{words('browser')}.includes('32 of 32 shown')")
        before = last_loss(browser)

        feed.show(snapshot(124))
        there = lines_of(124)
        there[-1]["loss"] = 0.4321
        write_lines(run / "metrics.jsonl", there)
        record = json.loads((run / "tokens" / "00000003.json").read_text())
        (run / "tokens" / "00000009.json").write_text(json.dumps({**record, "batch_id": 9}))
        browser.until(f"{words('browser')}.includes('40 of 40 shown')")
        browser.until(f"{words('blockers')} === 'nothing is stalled' && {words('phase')}.includes('124/160')")
        browser.until("[...document.querySelectorAll('.legend b')].pop().textContent === '0.4321'")
        assert before != "0.4321"
        for name, value, count in (("step", 7, 16), ("step_to", 7, 8), ("step", "", 32)):
            form = "document.querySelector('#browser form')"
            browser.value(f"{form}.elements.{name}.value = '{value}'; {form}.dispatchEvent(new Event('input'))")
            assert f"{count} of 40 shown" in browser.value(words("browser"))
        assert troubles(browser) == []
    browser.until(f"{words('link')}.includes('trying again')")

    there = lines_of(140)
    there[-1]["loss"] = 0.9876
    write_lines(run / "metrics.jsonl", there)
    with open_pages(run, address, feed=Feed()):
        browser.until(f"{words('link')} === 'live' && [...document.querySelectorAll('.legend b')].pop().textContent"
                      " === '0.9876'")  # fmt: skip
        body = "[...document.querySelectorAll('#charts figure')].pop().querySelector('details')"
        browser.value(f"{body}.open = true")
        browser.until(f"{body}.querySelectorAll('tbody tr').length === 140")
        summary = {"steps": 140, "pass_at_1_before": 0.25, "pass_at_1_after": 0.5, "learning_seconds": 75.0}
        (run / "summary.json").write_text(json.dumps(summary))
        browser.until(f"{words('link')} === 'ended'")
        figures = browser.value(words("figures"))
        assert [text in figures for text in ("0.250", "0.500", "1 min 15 s")] == [True] * 3
    assert browser.value("document.title") == "NousCoder run one"
    assert all(url.startswith(f"http://{address}/") for url in asked(browser)), "and no text of a run was run"
    browser.close_page()


def test_two_runs_lie_over_each_other_and_a_zoom_is_of_all_charts(run: Path, browser: Chromium) -> None:
    with open_pages(run, "127.0.0.1:0") as address:
        look(browser, address)
        browser.until("document.querySelectorAll('#chart-tools option').length === 2")
        browser.value(
            "(() => { const choice = document.querySelector('#chart-tools select'); choice.selectedIndex = 1;"
            " choice.dispatchEvent(new Event('change')); })()"
        )
        browser.until("document.querySelectorAll('#evaluated tbody tr').length === 8")
        charts = "[...document.querySelectorAll('#charts figure')]"
        reward = f"{charts}.find((one) => one.querySelector('h3').textContent === 'Reward')"
        browser.until(f"{reward}.querySelectorAll('.legend li').length === 4")
        names = browser.value(f"[...{reward}.querySelectorAll('.legend li')].map((one) => one.textContent)")
        assert [name.partition(":")[0][:9] for name in names] == ["one", "one", "long_name", "long_name"]
        assert "Where the learner's time went" in browser.value(f"{charts}.map((one) => one.innerText).join()")

        # The values of one step, by the keys; then a zoom by the form and by dragging.
        browser.value(f"{reward}.querySelector('.plot').focus()")
        browser.press("Home", 36)
        assert "at step 4" in browser.value(f"{reward}.innerText")
        form = "document.getElementById('chart-tools').elements"
        browser.value("document.querySelector('.u-over').scrollIntoView({block: 'center'})")
        box = browser.value("JSON.parse(JSON.stringify(document.querySelector('.u-over').getBoundingClientRect()))")
        for kind, share in (("Moved", 0.5), ("Pressed", 0.5), ("Moved", 0.6), ("Moved", 0.75), ("Released", 0.75)):
            place = {"x": box["left"] + share * box["width"], "y": box["top"] + 50}
            browser.ask("Input.dispatchMouseEvent", type=f"mouse{kind}", button="left", clickCount=1, **place)
        browser.until(f"{form}.low.value === '60' && {form}.high.value === '90'")
        browser.value("document.querySelector('#chart-tools button').click()")
        browser.until(f"{form}.low.value === ''")
        assert troubles(browser) == []
    browser.close_page()


INK = """(left, right, above, below) => {
  const figures = [...document.querySelectorAll('#charts figure')];
  const figure = figures.find((one) => one.innerText.startsWith('Evaluations'));
  const canvas = figure.querySelector('canvas'), { offsetLeft, offsetTop, offsetWidth, offsetHeight } =
    figure.querySelector('.u-over'), { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let y = 0; y < canvas.height; y++) for (let x = 0; x < canvas.width; x++) {
    const at = 4 * (y * canvas.width + x), share = (x - offsetLeft) / offsetWidth;
    const inside = y > offsetTop - 4 && y < offsetTop + offsetHeight + 4;
    if (share >= left && share <= right && (inside ? above : below)) count += data[at] < 9 && data[at + 2] > 150;
  }
  return count;
}"""


def test_two_evaluations_are_dots_with_whiskers_inside_the_plot_and_few_digits(run: Path, browser: Chromium) -> None:
    """Also: an outlier gets a logarithmic axis, and a chart without a pointer says no step."""
    for file in (run / "evaluations").iterdir():
        file.unlink()
    for name, version, rate in (("before", 0, 0.4), ("after", 30, 0.65)):
        record = {"policy_version": version, "pass_at_1": rate, "standard_error": 0.06504}
        (run / f"evaluation_{name}.json").write_text(json.dumps(record))
    lines = lines_of(120)
    for line in lines[40:44]:
        line["mismatch_max"] = 120.0
    write_lines(run / "metrics.jsonl", lines)
    with open_pages(run, "127.0.0.1:0") as address:
        look(browser, address)
        shown = browser.value(words("charts"))
        assert "0.65 ± 0.07" in shown
        assert "Learner to sampler ratio, log axis" in shown
        assert "newest values" not in shown
        assert "0.65 ± 0.07" in browser.value(words("evaluated"))
        assert troubles(browser) == []
        assert browser.value(f"({INK})(0, 1, true, false)") > 40, "dots and whiskers"
        assert browser.value(f"({INK})(0, 1, false, true)") == 0, "nothing outside the plot"
        assert browser.value(f"({INK})(0.1, 0.9, true, true)") == 0, "no line between them"
    browser.close_page()


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (400, "dark"),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in ((400, "light"), (1280, "dark"), (1280, "light"))),
    ],
)
def test_axe_finds_no_violation_and_nothing_is_wider_than_a_phone(
    run: Path, browser: Chromium, width: int, scheme: str
) -> None:
    axe = axe_script()
    feed = Feed()
    feed.show(snapshot(120, "No learner runs."))
    feed.say("run folder: /runs/" + "x" * 200)
    with open_pages(run, "127.0.0.1:0", feed=feed) as address:
        look(browser, address, width, scheme)
        browser.value("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        browser.until("document.querySelectorAll('figure table').length > 10")
        assert browser.value("document.documentElement.scrollWidth") <= width
        assert violations_on(browser, axe) == []
        assert troubles(browser) == []
    browser.close_page()


def test_the_chart_library_is_that_of_its_package() -> None:
    folder = UPLOT.folder()
    ours = Path(told.__file__).parent
    for theirs, name in (("uPlot.iife.min.js",) * 2, ("uPlot.min.css",) * 2, ("LICENSE", "uPlot.LICENSE")):
        assert (ours / name).read_bytes() == (folder / theirs).read_bytes(), name
