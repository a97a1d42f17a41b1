"""`nouscoder grade`, `tokens` and `prepare`: the grading service without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nouscoder.cli.options import ConfigOption, SetOption


def grade(
    file: Annotated[Path, typer.Argument(help="JSONL, one submission per line, in the form of POST /v1/grade")],
    out: Annotated[Path | None, typer.Option(help="JSONL of verdicts; default stdout")] = None,
    server: Annotated[str | None, typer.Option(help="URL of a grading service; default: grade on this machine")] = None,
    config_file: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Grade a file of submissions. Exit code 0 when each got a verdict other than internal_error."""
    from nouscoder.cli.grade_file import grade_file
    from nouscoder.config import load_config

    raise typer.Exit(grade_file(file, load_config(config_file, overrides or []), out, server))


tokens_app = typer.Typer(help="Tokens of the grading service's clients.", no_args_is_help=True)


@tokens_app.callback()
def _tokens() -> None:
    """Tokens of the grading service's clients."""


@tokens_app.command("new")
def tokens_new(name: Annotated[str, typer.Argument(help="the client's name")]) -> None:
    """Make a token. Prints the line for verifier.tokens_file to stdout, and the token, only now, to stderr."""
    from nouscoder.verifier.access.api_keys import new_api_key

    secret, line = new_api_key(name)
    typer.echo(f"token for {name}, shown only now: {secret}", err=True)
    typer.echo(line)


def prepare() -> None:
    """Compile what the sandboxes of this host need once: their init process and Go's standard library."""
    from nouscoder.verifier.sandbox.init_build import init_library_path
    from nouscoder.verifier.toolchains.languages import find_installed, registry
    from nouscoder.verifier.toolchains.toolchain_cache import prepare as prepare_language

    typer.echo(f"init: {init_library_path()}")
    for language in find_installed(registry()).values():
        if language.prepare is not None:
            typer.echo(f"{language.name}: {prepare_language(language)}")
