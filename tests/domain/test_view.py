"""The terminal view: its figures, its width of 80 columns, and when plain lines are printed."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from rich.console import Console

from nouscoder.domain.run_status import Ledger
from nouscoder.run.console.feed import Feed
from nouscoder.run.panel import render, sparkline
from nouscoder.run.snapshot import ProcessLine, Snapshot, duration, plain_line, plain_progress
from nouscoder.run.view import LiveView, PlainView, open_view

BALANCED = Ledger(2140, 1536, 384, 16, 0, {"queued": 12, "sampling": 64, "sampled": 20, "ready": 108, "grading": 0})
LOST = Ledger(2140, 1536, 384, 16, 0, {"queued": 12})
PROCESSES = (
    ProcessLine("broker", "running", 1234567),
    ProcessLine("verifier", "running", 1234568),
    ProcessLine("generation", "running", 1234569, 1),
    ProcessLine("learner", "restarting", None, 2),
)


def snapshot_of(batch: int = 24, ledger: Ledger | None = BALANCED, state: str = "training") -> Snapshot:
    return Snapshot(
        phase="training",
        batch=batch,
        total_batches=30,
        step=97,
        total_steps=120,
        pass_rate=0.734,
        reward_mean=0.469,
        staleness_mean=1.42,
        staleness_max=4,
        tests_per_second=312.4,
        tokens_per_second=8211.0,
        policy_version=24,
        ledger=ledger,
        time_left_s=72.3,
        elapsed_s=288.0,
        processes=PROCESSES,
        learner_state=state,
        pass_rates=tuple(index / 60 for index in range(60)),
    )


def drawn(snapshot: Snapshot, width: int = 80) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render(snapshot))
    return console.export_text()


def plain_console(width: int = 80) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, width=width), stream


def test_a_plain_line_has_every_figure_and_the_whole_ledger() -> None:
    line = plain_line(snapshot_of())
    for part in (
        "batch 24/30",
        "step 97/120",
        "pass rate 0.734",
        "reward +0.469",
        "staleness 1.42 max 4",
        "tests/s 312.4",
        "tokens/s 8211",
        "policy 24",
        "admitted 2140 = trained 1536 + filtered 384 + stale 16 + abandoned 0 + lost 0 + in flight 204",
        "(queued 12, sampling 64, sampled 20, ready 108)",
        "balanced yes",
        "left 1m12s",
    ):
        assert part in line


def test_both_views_show_an_unbalanced_ledger() -> None:
    assert "balanced NO" in plain_line(snapshot_of(ledger=LOST))
    assert "NOT BALANCED" in drawn(snapshot_of(ledger=LOST))
    assert "NOT BALANCED" not in drawn(snapshot_of())


def test_the_balance_is_red_or_green() -> None:
    for ledger, code in ((BALANCED, "\x1b[1;32mbalanced"), (LOST, "\x1b[1;37;41mNOT BALANCED")):
        stream = io.StringIO()
        Console(file=stream, width=80, force_terminal=True, color_system="standard").print(
            render(snapshot_of(ledger=ledger))
        )
        assert code in stream.getvalue()


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_panel_fits_its_width_and_shows_everything(width: int) -> None:
    text = drawn(snapshot_of(state="waiting for a batch of complete groups"), width)
    lines = text.splitlines()
    assert max(map(len, lines)) == width
    assert len(lines) <= 16
    assert "…" not in text
    for part in (
        "0.734",
        "+0.469",
        "1.42 (max 4)",
        "312.4",
        "8211",
        "batch 24/30",
        "1234569",
        "4m48s gone",
        "1m12s left",
    ):
        assert part in text


def test_a_snapshot_of_a_run_that_has_just_begun_can_be_shown() -> None:
    start = Snapshot("starting")
    assert "not known yet" in drawn(start)
    assert "pass rate - | reward - | staleness - max -" in plain_line(start)


def test_external_text_cannot_break_lines_or_control_the_terminal() -> None:
    text = "a\nb\x1b[2J [bold]c[/bold] \u202ed é"
    hostile = snapshot_of(state=text)
    assert "\x1b" not in drawn(hostile)
    assert "[bold]c[/bold]" in drawn(hostile)
    line = plain_progress("warm start", 1, 2, text)
    assert "\n" not in line
    assert "\x1b" not in line
    assert line.isascii()


def test_the_sparkline_has_a_fixed_scale_and_keeps_the_newest() -> None:
    assert sparkline((0.0, 0.5, 1.0)) == "▁▅█"
    assert sparkline((-1.0, 2.0)) == "▁█"
    assert sparkline((0.0,) * 50 + (1.0,), width=3) == "▁▁█"


def test_durations_are_shown_like_a_clock() -> None:
    assert [duration(s) for s in (None, 0, 59.6, 247, 3723)] == ["-", "0m00s", "1m00s", "4m07s", "1h02m03s"]


def test_plain_lines_are_printed_for_every_batch_and_at_most_every_two_seconds() -> None:
    now = [0.0]
    console, stream = plain_console()
    with PlainView(console, clock=lambda: now[0]) as view:
        for now[0], batch in ((0.0, 1), (0.5, 1), (1.9, 1), (2.0, 1), (2.1, 2), (2.2, 2), (4.2, 2)):
            view.show(snapshot_of(batch))
    batches = [line.split("batch ")[1].split("/")[0] for line in stream.getvalue().splitlines()]
    assert batches == ["1", "1", "2", "2"]


def test_a_lost_balance_is_printed_at_once() -> None:
    console, stream = plain_console()
    view = PlainView(console, clock=lambda: 0.0)
    view.show(snapshot_of())
    view.show(snapshot_of(ledger=LOST))
    assert [("balanced NO" in line) for line in stream.getvalue().splitlines()] == [False, True]


def test_the_progress_of_a_phase_is_printed_at_its_start_and_end() -> None:
    console, stream = plain_console()
    view = PlainView(console, clock=lambda: 0.0)
    for done in range(0, 401):
        view.progress("warm start", done, 400, "loss 1.2")
    view.progress("evaluation before", 3, 0)
    for seconds in (1, 2):
        view.progress(f"generation is starting ({seconds} s)", 0, 0)
    assert stream.getvalue().splitlines() == [
        "warm start | 0/400 (0%) | loss 1.2",
        "warm start | 400/400 (100%) | loss 1.2",
        "evaluation before | 3",
        "generation is starting (1 s)",
    ]


def test_the_live_view_redraws_in_place_and_restores_the_terminal() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, legacy_windows=False, _environ={"TERM": "xterm"})
    view = open_view(console)
    assert isinstance(view, LiveView)
    with view:
        view.progress("warm start", 1, 4, "loss 2.0")
        view.say("kept [not markup]")
        view.show(snapshot_of())
    text = stream.getvalue()
    assert "kept [not markup]" in text
    assert text.index("\x1b[?25l") < text.rindex("\x1b[?25h")  # the cursor is hidden, then shown again


def test_the_last_sentences_of_a_run_are_below_its_panel_also_while_the_pages_are_served() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, legacy_windows=False, _environ={"TERM": "xterm"})
    with open_view(console) as view:
        feed = Feed(view)
        feed.progress("evaluation after", 80, 80)
        feed.settle()
        feed.say("ledger balanced")
        feed.say("the run's pages are at http://127.0.0.1:21400/ until Ctrl-C")
        waiting = stream.getvalue()
        assert waiting.rindex("evaluation after") < waiting.index("ledger balanced")
        feed.show(snapshot_of())  # the next stage of a plan
        feed.say("stage two")
    text = stream.getvalue()
    assert "pages are at" in text.splitlines()[len(waiting.splitlines()) - 1], "no sentence is drawn over"
    assert text.count("pages are at") == 1
    assert text.index("stage two") > text.index("pages are at")


@pytest.mark.parametrize("terminal", ["dumb", "pipe", "latin"])
def test_a_console_that_cannot_draw_gets_plain_lines(terminal: str) -> None:
    encoding = "latin-1" if terminal == "latin" else "utf-8"
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    environ = {"TERM": "dumb" if terminal == "dumb" else "xterm"}
    console = Console(file=stream, width=80, force_terminal=terminal != "pipe", _environ=environ)
    assert isinstance(open_view(console), PlainView)


def test_the_view_loads_without_torch() -> None:
    code = "import sys, nouscoder.run.view; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
