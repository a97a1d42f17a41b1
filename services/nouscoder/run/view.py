"""The output of a run: a live panel in a terminal, plain lines elsewhere.

panel.py and plain_text.py render a snapshot; the views only decide when to show it.

INVARIANT of `PlainView`: a line is printed when the phase, the batch or the balance of the ledger changes, and at most
once in `min_interval_s` otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from nouscoder.run.panel import render, render_progress
from nouscoder.run.plain_text import plain_line, plain_progress
from nouscoder.run.snapshot import Snapshot


class View(Protocol):
    """Shows a run. A context manager, which restores the terminal on exit."""

    def __enter__(self) -> Self:
        """Start the view."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop showing."""

    def show(self, snapshot: Snapshot) -> None:
        """Show the current state of the run."""

    def progress(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Show that a phase outside the loop (warm start, evaluation) has done `done` of `total`; 0 means unknown."""

    def say(self, text: str) -> None:
        """Show a sentence permanently."""


def open_view(console: Console, min_interval_s: float = 2.0) -> View:
    """The live panel if the terminal can draw it, else plain lines, `min_interval_s` apart without changes."""
    can_draw = console.is_terminal and not console.is_dumb_terminal and console.encoding.lower().startswith("utf")
    return LiveView(console) if can_draw else PlainView(console, min_interval_s=min_interval_s)


class LiveView:
    """A panel that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, snapshot: Snapshot) -> None:
        """Redraw the panel."""
        self._live.update(render(snapshot), refresh=True)

    def progress(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Redraw the panel of a phase outside the loop."""
        self._live.update(render_progress(phase, done, total, note), refresh=True)

    def say(self, text: str) -> None:
        """Print above the panel."""
        self._live.console.print(Text(text))


class PlainView:
    """One line at a time, for logs and pipes."""

    def __init__(
        self, console: Console, clock: Callable[[], float] = time.monotonic, min_interval_s: float = 2.0
    ) -> None:
        self._console = console
        self._clock = clock
        self._min_interval_s = min_interval_s
        self._printed_at: float | None = None
        self._printed: tuple[object, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, snapshot: Snapshot) -> None:
        """Print a line if the batch, phase or balance changed or the last line is old enough."""
        balanced = None if snapshot.ledger is None else snapshot.ledger.balanced
        self._print_when_due((snapshot.phase, snapshot.batch, balanced), plain_line(snapshot))

    def progress(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Print a line at the start and the end of the phase, and at intervals between them."""
        self._print_when_due((phase, bool(total) and done >= total), plain_progress(phase, done, total, note))

    def say(self, text: str) -> None:
        """Print the sentence."""
        self._console.print(Text(text), soft_wrap=True)

    def _print_when_due(self, key: tuple[object, ...], line: str) -> None:
        now = self._clock()
        if key == self._printed and self._printed_at is not None and now - self._printed_at < self._min_interval_s:
            return
        self._printed, self._printed_at = key, now
        self._console.print(Text(line), soft_wrap=True)
