"""`nouscoder bench`: figures beside their controls, measured in the same run."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from nouscoder.cli.options import JsonOption, SetOption

bench_app = typer.Typer(no_args_is_help=True, help="Figures beside their controls, measured in the same run.")


@bench_app.command("verifier")
def bench_verifier(
    scale: Annotated[float, typer.Option(min=0.01, help="multiplies the number of submissions")] = 1.0,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Grade through the REST API under load, beside bare interpreter spawns."""
    import json

    import uvloop

    from nouscoder.bench import verifier

    result = uvloop.run(verifier.bench_verifier(tuple(overrides or ()), scale))
    typer.echo(json.dumps(verifier.as_record(result), indent=1) if as_json else verifier.as_text(result))


@bench_app.command("broker")
def bench_broker(
    batch: Annotated[int, typer.Option(min=32, help="rollouts of the large batch, a multiple of 8")] = 512,
    scale: Annotated[float, typer.Option(min=0.01, help="multiplies the number of small rollouts")] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Take rollouts through a broker process over gRPC, then one large batch of 32k tokens a rollout."""
    import json

    from nouscoder.bench import broker

    result = asyncio.run(broker.bench_broker(batch, scale))
    typer.echo(json.dumps(broker.as_record(result), indent=1) if as_json else broker.as_text(result))


@bench_app.command("verifier-load")
def bench_verifier_load(
    seconds: Annotated[float, typer.Option(min=1, help="how long it is overloaded")] = 600.0,
    submissions: Annotated[int, typer.Option(min=20, help="different submissions, of every verdict")] = 500,
    greed: Annotated[float, typer.Option(min=1, help="the first client asks so many times as often as others")] = 1.0,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Ask twice what a grading service can do, from four clients; exit code 0 when all was as it must be."""
    import json

    from nouscoder.bench import load, load_result

    plan = load_result.LoadPlan(num_seconds=seconds, num_submissions=submissions, greed=greed)
    result = asyncio.run(load.bench_load(plan, tuple(overrides or ())))
    typer.echo(json.dumps(load_result.as_record(result), indent=1) if as_json else load_result.as_text(result))
    raise typer.Exit(1 if load_result.complaints(result) else 0)
