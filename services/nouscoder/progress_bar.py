"""A progress bar on stderr, shown only in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(name: str, total: float | None) -> Iterator[Callable[[float], None]]:
    """Yields a function that advances the bar by the given amount. The total is None when it is not known."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        shown = bar.add_task(name, total=total)

        def advance(more: float) -> None:
            bar.advance(shown, more)

        yield advance
