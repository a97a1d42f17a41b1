"""A progress bar on stderr, shown only in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nouscoder.errors import one_line


class Advance(Protocol):
    """Advances a bar by the given amount, and shows `note` after its name."""

    def __call__(self, more: float, note: str = "") -> None:
        """Advance."""


@contextmanager
def progress_bar(name: str, total: float | None) -> Iterator[Advance]:
    """Yields a function that advances the bar. The total is None when it is not known."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _silent  # a bar that is not shown takes time too, much for a row of a data set
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        shown = bar.add_task(name, total=total)

        def advance(more: float, note: str = "") -> None:
            bar.update(shown, advance=more, description=escape(one_line(f"{name} {note}")))

        yield advance


def _silent(more: float, note: str = "") -> None:
    """Show nothing."""
