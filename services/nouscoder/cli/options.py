"""Options that several commands share, and the exit code of unusable configurations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from nouscoder.errors import Unusable

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="configuration, TOML or JSON; default: all defaults")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="change one value")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON")]


@contextmanager
def unusable_is_78() -> Iterator[None]:
    """Print an `Unusable` error as one line to stderr and exit with code 78, after which no supervisor restarts it."""
    from nouscoder.run.supervisor import EXIT_UNUSABLE

    try:
        yield
    except Unusable as error:
        typer.echo(f"nouscoder: {error}", err=True)
        raise typer.Exit(EXIT_UNUSABLE) from error
