"""`nouscoder objectives`: training objectives on recorded batches."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nouscoder.cli.options import JsonOption, SetOption

objectives_app = typer.Typer(no_args_is_help=True, help="Training objectives on recorded batches.")


@objectives_app.callback()
def _objectives() -> None:
    """Training objectives on recorded batches."""


@objectives_app.command("compare")
def objectives_compare(
    batch: Annotated[Path, typer.Argument(metavar="BATCH", help="a saved batch: runs/NAME/batches/NUMBER.batch")],
    policy: Annotated[
        int | None, typer.Option(min=0, help="policy version in training; default: the one that the batch made")
    ] = None,
    old_policy: Annotated[
        int | None, typer.Option(min=0, help="policy version before the batch; default: the batch's own")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="write the figures and their charts to this page, too")] = None,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Evaluate one batch under every objective: loss, gradient, cosines between gradients, share of clipped tokens."""
    from nouscoder.learner import compare
    from nouscoder.report.objectives_page import write_objectives_page

    comparisons = compare.compare_file(batch, overrides or [], policy, old_policy)
    if html is not None:
        run = batch.resolve().parents[1].name
        write_objectives_page(html, f"batch {batch.stem} of {run}", [asdict(item) for item in comparisons])
    typer.echo(compare.as_json(comparisons) if as_json else compare.as_table(comparisons))
