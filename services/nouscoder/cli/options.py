"""What several commands share: options and a default subcommand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main

from nouscoder.domain.reasoning import CLOSING, opened_by
from nouscoder.errors import Unusable, WrongUse, for_terminal
from nouscoder.formats.json_values import RepeatedKey, json_weight
from nouscoder.input_file import kind_of

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="configuration, TOML or JSON; default: all defaults")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="change one value")]
AGAIN = "the same command goes on where it stopped"
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON")]


def _prefill(given: str) -> str:
    if given and not opened_by(given):
        raise WrongUse(f"--prefill {given!r:.80} ends with none of {', '.join(CLOSING)}")
    return given


Opened = Annotated[
    str, typer.Option(callback=_prefill, help="tag with which the chat template opens reasoning, such as '<think>'")
]


def new(wanted: str, about: str, *names: str) -> Any:
    """An option for the place of a "file" or "folder" to make. What is there and is none is Unusable."""

    def checked(out: Path | None) -> Path | None:
        if out is not None and out.is_symlink() and not out.exists():
            raise Unusable(
                f"{out} is a link to {out.readlink()}, which does not exist: give the name of a new {wanted}"
            )
        if out is not None and out.exists() and (kind := kind_of(out)) != f"a {wanted}":
            raise Unusable(f"{out} is {kind}, not a {wanted}: give the name of a new {wanted}")
        return out

    return typer.Option(*names, help=about, callback=checked)


def say(text: object, *, err: bool = False) -> None:
    """Print the text to stdout, or to stderr, without characters that control a terminal."""
    typer.echo(for_terminal(text), err=err)


class RunByDefault(typer.core.TyperGroup):
    """A command with subcommands. Without one, the arguments are those of its subcommand `run`."""

    default = "run"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default before the arguments when no subcommand is named."""
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = [self.default, *args]
        return super().parse_args(ctx, args)


class ListByDefault(RunByDefault):
    """The same with the subcommand `list`, also without any argument."""

    default = "list"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default in the place of no arguments."""
        return super().parse_args(ctx, args or [self.default])


def only_with(what: str, is_there: object, *options: str) -> None:
    """Raises BadParameter when one of `options`, which are for `what`, was given and `what` is not there."""
    context = typer.main.get_current_context()  # type: ignore[attr-defined]  # typer offers no other way
    for parameter in context.command.params:
        source, option = context.get_parameter_source(parameter.name), parameter.opts[0]
        if option in options and not is_there and source and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"it is for {what}", param_hint=option)


def json_fields(option: str, text: str) -> dict[str, Any]:
    """The JSON object in the text of an option. Raises WrongUse."""
    try:
        json_weight(text)
        fields = json.loads(text)
    except RepeatedKey as error:
        raise WrongUse(f"{option}: {error}") from None
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise WrongUse(f"{option} {text!r:.80} is not a JSON object")
    return fields


@contextmanager
def goes_on(how: str) -> Iterator[None]:
    """Ctrl-C in the block makes the command end with one line, which says `how` it goes on."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(how)
        raise
