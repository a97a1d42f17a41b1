"""What several commands share: options, a default subcommand, and the exit code of unusable configurations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from nouscoder.errors import Unusable

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="configuration, TOML or JSON; default: all defaults")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="change one value")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON")]


class RunByDefault(typer.core.TyperGroup):
    """A command with subcommands. Without one, the arguments are those of its subcommand `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `run` before the arguments when no subcommand is named."""
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["run", *args]
        return super().parse_args(ctx, args)


def json_fields(option: str, text: str) -> dict[str, Any]:
    """The JSON object in the text of an option. Raises Unusable."""
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise Unusable(f"{option} {text!r:.80} is not a JSON object")
    return fields


@contextmanager
def unusable_is_78() -> Iterator[None]:
    """Print an `Unusable` error as one line to stderr and exit with code 78, after which no supervisor restarts it."""
    from nouscoder.run.supervisor import EXIT_UNUSABLE

    try:
        yield
    except Unusable as error:
        typer.echo(f"nouscoder: {error}", err=True)
        raise typer.Exit(EXIT_UNUSABLE) from error
