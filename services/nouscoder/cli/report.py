"""`nouscoder report`: the pages of runs, also of stopped ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nouscoder.cli.options import RunByDefault

report_app = typer.Typer(cls=RunByDefault, no_args_is_help=True)


@report_app.callback()
def _report() -> None:
    """The pages of runs, also of stopped ones. `report RUN` is `report run RUN`."""


@report_app.command("run")
def report_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder: runs/NAME, or that of a plan's stage")],
) -> None:
    """Write report.html and rollouts.html of a run into its folder."""
    from nouscoder.report.page import write_report
    from nouscoder.report.run_data import run_folder

    typer.echo(f"the report is in {write_report(run_folder(run))}")


@report_app.command("compare")
def report_compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="run folders, at most 8")],
    to: Annotated[Path, typer.Option("--to", help="the page")] = Path("comparison.html"),
) -> None:
    """Write one page with the curves of several runs: reward, evaluations, lengths, pass@k, entropy."""
    from nouscoder.report.compare import write_comparison

    typer.echo(f"the comparison is in {write_comparison(to, runs)}")
