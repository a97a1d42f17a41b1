"""`nouscoder runs`: the runs in the folder run.root and in Redis; `nouscoder export`: a policy of a run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from nouscoder.cli.options import ConfigOption, JsonOption, SetOption

runs_app = typer.Typer(no_args_is_help=True, help="The runs in the run folders and in Redis.")


@runs_app.callback()
def _runs() -> None:
    """The runs in the run folders and in Redis."""


@runs_app.command("list")
def runs_list(config_file: ConfigOption = None, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """List the runs in run.root and in broker.redis_url: how far they are, and whether the two belong together."""
    from nouscoder.cli.runs_text import runs_text
    from nouscoder.config import load_config
    from nouscoder.run.runs import list_runs

    typer.echo(runs_text(asyncio.run(list_runs(load_config(config_file, overrides or []))), as_json=as_json))


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder: runs/NAME, or that of a plan")],
    to: Annotated[Path, typer.Option("--to", help="the new folder")],
    version: Annotated[str, typer.Option("--version", help="a policy version, last or best by evaluation")] = "last",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="only the adapter (LoRA) of the version, in the form of PEFT")
    ] = False,
) -> None:
    """Write a policy of a run as a Hugging Face folder, with a model card from its settings and evaluations."""
    from nouscoder.run.export import export as export_version

    number = export_version(run, to, version, adapter=adapter)
    typer.echo(f"version {number} of {run} is in {to}")


@runs_app.command("rm")
def runs_rm(
    name: Annotated[str, typer.Argument(help="name of the run")],
    config_file: ConfigOption = None,
    overrides: SetOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove a run for good: its folder with checkpoints and report, and its keys in Redis."""
    from nouscoder.cli.runs_text import removed_text
    from nouscoder.config import load_config
    from nouscoder.run.runs import remove_run

    config = load_config(config_file, [*(overrides or []), f"run.name={name}"])
    if not yes:
        typer.confirm(f"Remove run {name}, its folder {config.run.folder} and its state in Redis?", abort=True)
    typer.echo(removed_text(asyncio.run(remove_run(config)), as_json=as_json))
