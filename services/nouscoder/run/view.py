"""The output of a run: a live panel in a terminal, plain lines elsewhere.

`panel` and `plain_text` render a snapshot; the views only decide when to show it.

INVARIANT of `PlainView`: a line is printed when the phase, the batch or the balance of the ledger changes, and at most
once in `min_interval_s` otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from nouscoder.errors import for_terminal
from nouscoder.run.panel import render, render_progress
from nouscoder.run.snapshot import Snapshot, plain_line, plain_progress


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
