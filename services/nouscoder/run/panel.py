"""A run as a panel on a terminal of at least 80 columns. Pure."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nouscoder.domain.run_status import Ledger
from nouscoder.errors import one_line
from nouscoder.run.snapshot import ProcessLine, Snapshot, duration, figures, ledger_numbers, number

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
