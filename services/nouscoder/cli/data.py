"""`nouscoder data`: problem files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nouscoder.cli.options import ConfigOption, JsonOption, SetOption

data_app = typer.Typer(no_args_is_help=True, help="Problem files.")


@data_app.callback()
def _data() -> None:
    """Problem files."""


@data_app.command("inspect")
def data_inspect(
    file: Annotated[Path, typer.Argument(help="problems: NousCoder's JSONL, LeetCodeDataset or CodeContests (.gz)")],
    flaky: Annotated[bool, typer.Option("--flaky", help="run the reference solutions several times")] = False,
    rounds: Annotated[int, typer.Option(min=2, help="runs of each reference on each test")] = 5,
    as_json: JsonOption = False,
    config_file: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Count the problems and tests of a file. With --flaky, find unreliable tests; exit code 1 when there are any."""
    from nouscoder.config import load_config
    from nouscoder.data import inspect

    if flaky:
        section = load_config(config_file, overrides or []).verifier
        text, code = inspect.audit_file(file, section, rounds, as_json=as_json)
    else:
        text, code = inspect.inspect_file(file, as_json=as_json)
    typer.echo(text)
    raise typer.Exit(code)


@data_app.command("schema")
def data_schema() -> None:
    """Print the JSON Schema of a problem file's lines, with an example for each type of tests."""
    import json

    from nouscoder.data.schema import problem_schema

    typer.echo(json.dumps(problem_schema(), indent=1))
