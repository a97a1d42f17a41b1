"""Options that several commands share, and how their errors become exit codes."""

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
    """What can never work as given is one line on stderr and exit code 78, so that nobody starts it again."""
    from nouscoder.run.supervisor import EXIT_UNUSABLE

    try:
        yield
    except Unusable as error:
        typer.echo(f"nouscoder: {error}", err=True)
        raise typer.Exit(EXIT_UNUSABLE) from error
