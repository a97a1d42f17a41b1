"""`nouscoder plan`: the stages of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nouscoder.cli.options import JsonOption, SetOption

plan_app = typer.Typer(no_args_is_help=True, help="The stages of a training.")


@plan_app.callback()
def _plan() -> None:
    """The stages of a training."""


@plan_app.command("show")
def plan_show(
    config_file: Annotated[Path, typer.Argument(metavar="CONFIG", help="configuration with plan.stages, TOML or JSON")],
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Print each stage: what it begins with, what it changes, when it ends, and what came of it so far."""
    from nouscoder.cli.plan_text import plan_text
    from nouscoder.config import load_config

    typer.echo(plan_text(load_config(config_file, overrides or []), as_json=as_json))
