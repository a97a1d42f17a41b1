"""The output of a run: a live panel in a terminal, plain lines elsewhere.

`panel` and `plain_text` render a snapshot; the views only decide when to show it.

INVARIANT of `PlainView`: a line is printed when the phase, the batch or the balance of the ledger changes, and at most
once in `min_interval_s` otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nouscoder.domain.run_status import IN_FLIGHT, Ledger
from nouscoder.errors import for_terminal, one_line

# The state of a run at one time.


@dataclass(frozen=True, slots=True)
class ProcessLine:
    """One process of a local run. `state` is a word such as running, restarting, stopped."""

    name: str
    state: str
    pid: int | None = None
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of the run at one time. Unknown values are None.

    `pass_rates` [batches] are those of the batches so far, oldest first. `blockers` are what `nouscoder why-stalled`
    says, None when nobody asked.
    """

    phase: str
    batch: int = 0
    total_batches: int = 0
    step: int = 0
    total_steps: int = 0
    pass_rate: float | None = None
    reward_mean: float | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    tests_per_second: float | None = None
    tokens_per_second: float | None = None
    policy_version: int | None = None
    ledger: Ledger | None = None
    time_left_s: float | None = None
    elapsed_s: float = 0.0
    processes: tuple[ProcessLine, ...] = ()
    learner_state: str = ""
    pass_rates: tuple[float, ...] = ()
    blockers: tuple[str, ...] | None = None


# A run in plain text, and the pieces of text that the panel uses too. Pure.

UNKNOWN = "-"


def plain_line(snapshot: Snapshot) -> str:
    """The snapshot in one line of `name value` pairs, ASCII, without line breaks."""
    known, ledger = snapshot.ledger, UNKNOWN
    if known is not None:
        ledger = f"{ledger_numbers(known)} | balanced {'yes' if known.balanced else 'NO'}"
    parts = [
        snapshot.phase,
        *(f"{name} {value}" for name, value in figures(snapshot).items()),
        f"ledger {ledger}",
        f"left {duration(snapshot.time_left_s)}",
    ]
    return " | ".join(parts).encode("ascii", "backslashreplace").decode()


def figures(snapshot: Snapshot) -> dict[str, str]:
    """The figures of the run as texts, by name."""
    return {
        "batch": f"{snapshot.batch}/{snapshot.total_batches}",
        "step": f"{snapshot.step}/{snapshot.total_steps}",
        "pass rate": number(snapshot.pass_rate, ".3f"),
        "reward": number(snapshot.reward_mean, "+.3f"),
        "staleness": f"{number(snapshot.staleness_mean, '.2f')} max {number(snapshot.staleness_max, 'd')}",
        "tests/s": number(snapshot.tests_per_second, ".1f"),
        "tokens/s": number(snapshot.tokens_per_second, ".0f"),
        "policy": number(snapshot.policy_version, "d"),
    }


def plain_progress(phase: str, done: int, total: int, note: str = "") -> str:
    """A phase outside the loop in one line."""
    count = f"{done}/{total} ({done / total:.0%})" if total else str(done or "")
    return " | ".join(filter(None, [phase, count, one_line(note)])).encode("ascii", "backslashreplace").decode()


def duration(seconds: float | None) -> str:
    """A duration such as 4m07s; a dash when it is unknown."""
    if seconds is None:
        return UNKNOWN
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m{rest:02}s" if hours else f"{minutes}m{rest:02}s"


def number(value: float | None, form: str) -> str:
    """The number in a format of Python; a dash when it is unknown."""
    return UNKNOWN if value is None else format(value, form)


def _in_flight(ledger: Ledger) -> str:
    """The in-flight counts that are not 0, in the order of a rollout's life."""
    known = [state.value for state in IN_FLIGHT]
    order = known + sorted(set(ledger.in_flight) - set(known))
    counts = [f"{name} {ledger.in_flight[name]}" for name in order if ledger.in_flight.get(name)]
    return f"in flight {sum(ledger.in_flight.values())}" + (f" ({', '.join(counts)})" if counts else "")


def ledger_numbers(ledger: Ledger) -> str:
    """The ledger as its equation."""
    return (
        f"admitted {ledger.admitted} = trained {ledger.trained} + filtered {ledger.filtered} + stale {ledger.stale}"
        f" + abandoned {ledger.abandoned} + lost {ledger.lost} + {_in_flight(ledger)}"
    )


# A run as a panel on a terminal of at least 80 columns. Pure.

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40


def render(snapshot: Snapshot) -> RenderableType:
    """The panel of the loop, for at least 80 columns."""
    rows = Table.grid(expand=True, padding=(0, 1))
    rows.add_column(no_wrap=True, style="dim")
    rows.add_column(ratio=1)
    rows.add_row("by batch", _pass_rates(snapshot.pass_rates))
    rows.add_row("ledger", _ledger_text(snapshot.ledger))
    if snapshot.learner_state:
        rows.add_row("learner", Text(one_line(snapshot.learner_state)))
    if snapshot.processes:
        rows.add_row("processes", _processes(snapshot.processes))
    footer = f"{duration(snapshot.elapsed_s)} gone, {duration(snapshot.time_left_s)} left"
    count = f"batch {snapshot.batch}/{snapshot.total_batches}  step {snapshot.step}/{snapshot.total_steps}"
    bar = _bar_row(count, snapshot.step, snapshot.total_steps)
    return _panel(snapshot.phase, Group(bar, _figures(snapshot), rows), footer)


def render_progress(phase: str, done: int, total: int, note: str = "") -> RenderableType:
    """The panel of a phase outside the loop."""
    rows: list[RenderableType] = [_bar_row(f"{done}/{total}" if total else str(done or ""), done, total)]
    if note:
        rows.append(Text(one_line(note), style="dim"))
    return _panel(phase, Group(*rows), None)


def _panel(phase: str, content: RenderableType, footer: str | None) -> Panel:
    subtitle = None if footer is None else Text(footer)
    return Panel(content, title=Text(f"nouscoder: {one_line(phase)}"), subtitle=subtitle, border_style="cyan")


def sparkline(rates: tuple[float, ...], width: int = _SPARK_WIDTH) -> str:
    """The last `width` rates, each in [0, 1], as bars on a fixed scale from 0 to 1."""
    return "".join(_BLOCKS[round(min(max(rate, 0.0), 1.0) * (len(_BLOCKS) - 1))] for rate in rates[-width:])


def _ledger_text(ledger: Ledger | None) -> Text:
    if ledger is None:
        return Text("not known yet")
    verdict, style = ("balanced", "bold green") if ledger.balanced else ("NOT BALANCED", "bold white on red")
    return Text.assemble((verdict, style), "  ", ledger_numbers(ledger))


def _bar_row(count: str, done: int, total: int) -> Table:
    row = Table.grid(expand=True, padding=(0, 1))
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    row.add_row(ProgressBar(total=total or 1, completed=min(done, total), complete_style="green"), Text(count))
    return row


def _figures(snapshot: Snapshot) -> Table:
    grid = Table.grid(expand=True, padding=(0, 1))
    for _ in range(3):
        grid.add_column(no_wrap=True, style="dim")
        grid.add_column(no_wrap=True, ratio=1, style="bold")
    staleness = f"{number(snapshot.staleness_mean, '.2f')} (max {number(snapshot.staleness_max, 'd')})"
    shown = figures(snapshot) | {"staleness": staleness}
    for row in (("pass rate", "reward", "staleness"), ("tests/s", "tokens/s", "policy")):
        grid.add_row(*(cell for name in row for cell in (name, shown[name])))
    return grid


def _pass_rates(rates: tuple[float, ...]) -> Text:
    if not rates:
        return Text("no batch yet")
    shown = rates[-_SPARK_WIDTH:]
    return Text.assemble((sparkline(rates), "cyan"), f"  pass rate {shown[0]:.2f} to {shown[-1]:.2f}")


def _processes(processes: tuple[ProcessLine, ...]) -> Table:
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    cells = [_process(process) for process in processes]
    for left in range(0, len(cells), 2):
        grid.add_row(*cells[left : left + 2])
    return grid


def _process(process: ProcessLine) -> Text:
    text = Text(f"{process.name} ").append(process.state, style="green" if process.state == "running" else "yellow")
    if process.pid is not None:
        text.append(f" {process.pid}", style="dim")
    if process.restarts:
        text.append(f" restarted {process.restarts}x", style="yellow")
    return text


# The views.


class View:
    """Shows a run. A context manager, which restores the terminal on exit. This one shows nothing."""

    @property
    def shows_blockers(self) -> bool:
        """Whether `show` needs the snapshot's blockers, which cost the broker a request."""
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Stop showing."""

    def show(self, snapshot: Snapshot) -> None:
        """Show the current state of the run."""

    def progress(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Show that a phase outside the loop (warm start, evaluation) has done `done` of `total`; 0 means unknown."""

    def say(self, text: str) -> None:
        """Show a sentence permanently."""

    def settle(self) -> None:
        """Leave what is drawn as it is: what is said next comes below it."""


def open_view(console: Console, min_interval_s: float = 2.0) -> View:
    """The live panel if the terminal can draw it, else plain lines, `min_interval_s` apart without changes."""
    can_draw = console.is_terminal and not console.is_dumb_terminal and console.encoding.lower().startswith("utf")
    return LiveView(console) if can_draw else PlainView(console, min_interval_s=min_interval_s)


class LiveView(View):
    """A panel that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None

    def __exit__(self, *error: object) -> None:
        self.settle()

    def show(self, snapshot: Snapshot) -> None:
        """Redraw the panel."""
        self._draw(render(snapshot))

    def progress(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Redraw the panel of a phase outside the loop."""
        self._draw(render_progress(phase, done, total, note))

    def say(self, text: str) -> None:
        """Print above the panel."""
        self._console.print(Text(for_terminal(text)))

    def settle(self) -> None:
        """Leave the panel. The next one is drawn below what is said until then."""
        if self._live is not None:
            self._live.stop()
        self._live = None

    def _draw(self, panel: RenderableType) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(panel, refresh=True)


class PlainView(View):
    """One line at a time, for logs and pipes."""

    def __init__(
        self, console: Console, clock: Callable[[], float] = time.monotonic, min_interval_s: float = 2.0
    ) -> None:
        self._console = console
        self._clock = clock
        self._min_interval_s = min_interval_s
        self._printed_at: float | None = None
        self._printed: tuple[object, ...] = ()

    def show(self, snapshot: Snapshot) -> None:
        """Print a line if the batch, phase or balance changed or the last line is old enough."""
        balanced = None if snapshot.ledger is None else snapshot.ledger.balanced
        self._print_when_due((snapshot.phase, snapshot.batch, balanced), plain_line(snapshot))

    def progress(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Print a line at the start and the end of the phase, and at intervals between them."""
        key = (phase.partition(" (")[0], bool(total) and done >= total)
        self._print_when_due(key, plain_progress(phase, done, total, note))

    def say(self, text: str) -> None:
        """Print the sentence."""
        self._console.print(Text(for_terminal(text)), soft_wrap=True)

    def _print_when_due(self, key: tuple[object, ...], line: str) -> None:
        now = self._clock()
        if key == self._printed and self._printed_at is not None and now - self._printed_at < self._min_interval_s:
            return
        self._printed, self._printed_at = key, now
        self._console.print(Text(for_terminal(line)), soft_wrap=True)
