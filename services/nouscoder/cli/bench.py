"""`nouscoder bench`: figures and their controls, measured in the same run."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from nouscoder.cli.options import JsonOption, SetOption

bench_app = typer.Typer(no_args_is_help=True, help="Figures and their controls, measured in the same run.")


class PairOfPeer(typer.core.TyperCommand):
    """A command whose option `--peer` takes two words. Typer has no repeatable option of two."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Join `--peer KIND URL` to `--peer KIND=URL`."""
        joined: list[str] = []
        for word in args:
            if joined[-2:-1] == ["--peer"] and "=" not in joined[-1] and not word.startswith("-"):
                joined[-1] += f"={word}"
            else:
                joined.append(word)
        return super().parse_args(ctx, joined)


@bench_app.command("verifier", cls=PairOfPeer)
def bench_verifier(
    scale: Annotated[float, typer.Option(min=0.01, help="multiplies the number of submissions")] = 1.0,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND URL", help="a running judge to compare with: go-judge or sandboxfusion; repeatable"),
    ] = None,
    processes: Annotated[
        int,
        typer.Option(min=1, max=64, help="backend local: also measure this number of gateway processes; 1: only one"),
    ] = 2,
    simulate_slots: Annotated[
        str,
        typer.Option(help="only this: the capacity of the gateway with so many slots that sleep, such as 1,2,4,8,16"),
    ] = "",
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Grade through the REST API under load, compared with bare interpreter spawns."""
    import json

    import uvloop

    from nouscoder.bench import gateway, peers, verifier, verifier_result

    if simulate_slots:
        numbers = gateway.slot_numbers(simulate_slots)
        load = uvloop.run(gateway.bench_gateway(numbers, tuple(overrides or ()), seconds=4 * scale))
        typer.echo(json.dumps(gateway.as_record(load), indent=1) if as_json else gateway.as_text(load))
        return

    compared = [peers.peer_of(each) for each in peer or ()]
    result = uvloop.run(verifier.bench_verifier(tuple(overrides or ()), scale, peers=compared, processes=processes))
    typer.echo(json.dumps(verifier_result.as_record(result), indent=1) if as_json else verifier_result.as_text(result))


@bench_app.command("broker")
def bench_broker(
    batch: Annotated[int, typer.Option(min=32, help="rollouts of the large batch, a multiple of 8")] = 512,
    scale: Annotated[float, typer.Option(min=0.01, help="multiplies the number of small rollouts")] = 1.0,
    many: Annotated[int, typer.Option(min=0, help="only this: so many rollouts in one run, 0 for the rest")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Send rollouts through a broker process over gRPC, then one large batch of 32k tokens per rollout.

    With --many: measure whether the broker stays as fast and as small after so many rollouts over 24,000 problems.
    """
    import json

    if many:
        from nouscoder.bench import broker_many

        points = asyncio.run(broker_many.bench_many(many))
        typer.echo(json.dumps(broker_many.as_record(points), indent=1) if as_json else broker_many.as_text(points))
        return
    from nouscoder.bench import broker

    result = asyncio.run(broker.bench_broker(batch, scale))
    typer.echo(json.dumps(broker.as_record(result), indent=1) if as_json else broker.as_text(result))


@bench_app.command("learner")
def bench_learner(
    rounds: Annotated[int, typer.Option(min=1, help="how often everything is measured; the medians count")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of the training")] = 1,
    shape: Annotated[
        str, typer.Option(help="only this: MFU and memory of a step with a policy of this shape, such as qwen3-4b")
    ] = "",
    row_tokens: Annotated[int, typer.Option(min=64, help="with --shape: tokens of a row")] = 32768,
    rows: Annotated[int, typer.Option(min=1, help="with --shape: rows of a step")] = 2,
    sequences: Annotated[int, typer.Option(min=1, help="with --shape: rollouts of a row")] = 8,
    context: Annotated[bool, typer.Option(help="with --shape: find the longest rollout that fits")] = False,
    limit: Annotated[float, typer.Option(min=1, help="with --context: seconds of the search")] = 240.0,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Train a batch of random rollouts, compared with a bare forward and backward pass on the same tokens.

    With --shape the settings are those of [learner], such as --set learner.device=cuda.
    """
    import json

    if shape:
        from nouscoder.bench import learner_step
        from nouscoder.config import load_config

        load = learner_step.StepLoad(shape, row_tokens, rows, sequences, rounds, context, limit)
        config = load_config(None, [*learner_step.defaults(load), *(overrides or ())])
        found = learner_step.bench_step(load, config, partial(typer.echo, err=as_json))
        if as_json:
            typer.echo(json.dumps(learner_step.as_record(found), indent=1))
        return
    from nouscoder.bench import learner

    result = learner.bench_learner(rounds, threads)
    typer.echo(json.dumps(learner.as_record(result), indent=1) if as_json else learner.as_text(result))


@bench_app.command("objectives")
def bench_objectives(
    seeds: Annotated[int, typer.Option(min=1, help="number of seeds, from 0")] = 3,
    batches: Annotated[int, typer.Option(min=2, help="batches of each run")] = 40,
    only: Annotated[list[str] | None, typer.Option(help="only this variant; may be repeated; default: all")] = None,
    root: Annotated[Path, typer.Option(help="folder of the runs; finished ones are not repeated")] = Path(
        "runs/objectives"
    ),
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Run the demo with each objective and strictly on-policy: pass@1 before and after as many steps. Takes an hour."""
    import json

    from rich.console import Console

    from nouscoder.bench import objective_figures, objectives
    from nouscoder.run.loop import interruptible
    from nouscoder.run.view import open_view

    plan = objectives.ObjectivePlan(
        root, seeds, batches, tuple(only or objectives.VARIANTS), overrides=tuple(overrides or ())
    )
    with open_view(Console(stderr=True)) as view:
        code = asyncio.run(interruptible(objectives.run_missing(plan, view)))
    result = objectives.result_of(plan)
    as_record, as_text = objective_figures.as_record, objective_figures.as_text
    typer.echo(json.dumps(as_record(result), indent=1) if as_json else as_text(result))
    raise typer.Exit(code)


@bench_app.command("generation")
def bench_generation(
    engine: Annotated[str, typer.Option(help="torch, vllm or fake")] = "torch",
    seconds: Annotated[float, typer.Option(min=0.5, help="duration of a window")] = 10.0,
    python: Annotated[str | None, typer.Option(help="the Python that has the engine; default: this one")] = None,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Sample rollouts through service and broker, compared with the engine alone: updates, and a slow verifier."""
    import json
    import sys

    from nouscoder.bench import generation

    result = asyncio.run(generation.bench_generation(engine, seconds, python or sys.executable, tuple(overrides or ())))
    typer.echo(json.dumps(generation.as_record(result), indent=1) if as_json else generation.as_text(result))


@bench_app.command("import")
def bench_import(
    megabytes: Annotated[int, typer.Option(min=1, help="size of each set, in MB of JSON lines")] = 1000,
    layout: Annotated[list[str] | None, typer.Option(help="taco, synthetic1, livecodebench; default: each")] = None,
    folder: Annotated[Path | None, typer.Option(help="where the tests are stored meanwhile")] = None,
    as_json: JsonOption = False,
) -> None:
    """Import made-up sets of published layouts: speed for each core and memory, beside bare libraries."""
    import json

    from nouscoder.bench import importing
    from nouscoder.bench.import_rows import layouts_named

    figures = importing.bench_import(layouts_named(layout or []), megabytes * importing.MEGABYTE, folder)
    typer.echo(json.dumps(importing.as_record(figures), indent=1) if as_json else importing.as_text(figures))


@bench_app.command("leaks")
def bench_leaks(
    problems: Annotated[int, typer.Option(min=100, help="problems that are searched")] = 20_000,
    leaks: Annotated[int, typer.Option(min=0, help="how many of them leak the evaluation set")] = 50,
    as_json: JsonOption = False,
) -> None:
    """Search problems for planted leaks of an evaluation set. Exit code 0 when exactly these are found."""
    import json

    from nouscoder.bench import leaks as searching

    figures = searching.bench_leaks(problems, leaks)
    typer.echo(json.dumps(searching.as_record(figures), indent=1) if as_json else searching.as_text(figures))
    raise typer.Exit(1 if figures.missed or figures.wrong else 0)


@bench_app.command("chaos")
def bench_chaos(
    minutes: Annotated[float, typer.Option(min=0.1, help="how long services and Redis fail at random")] = 5.0,
    seed: Annotated[int, typer.Option(min=0, help="decides the faults and their order")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Make the services and the Redis of a run fail in every known way. Exit code 0 if the run holds."""
    import json

    from nouscoder.bench import chaos, chaos_result

    result = asyncio.run(chaos.bench_chaos(minutes, seed, lambda line: typer.echo(line, err=True)))
    typer.echo(json.dumps(chaos_result.as_record(result), indent=1) if as_json else chaos_result.as_text(result))
    raise typer.Exit(1 if result.complaints else 0)


@bench_app.command("verifier-load")
def bench_verifier_load(
    seconds: Annotated[float, typer.Option(min=1, help="duration of the overload")] = 600.0,
    submissions: Annotated[int, typer.Option(min=20, help="number of different submissions, for every verdict")] = 500,
    greed: Annotated[float, typer.Option(min=1, help="request rate of the first client, relative to the others")] = 1.0,
    clients: Annotated[int, typer.Option(min=2, help="number of clients, all with the same right to slots")] = 4,
    hostile: Annotated[int, typer.Option(min=0, help="how many of them send hostile programs")] = 0,
    overload: Annotated[float, typer.Option(min=1, help="the rate of all clients, relative to the capacity")] = 2.0,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Send twice the capacity of a grading service, from four clients. Exit code 0 when all checks pass."""
    if hostile >= clients:
        raise typer.BadParameter("at least one client must be honest", param_hint="--hostile")
    import json

    from nouscoder.bench import load, load_result

    plan = load_result.LoadPlan(
        num_seconds=seconds,
        num_submissions=submissions,
        num_clients=clients,
        num_hostile=hostile,
        overload=overload,
        greed=greed,
    )
    result = asyncio.run(load.bench_load(plan, tuple(overrides or ())))
    typer.echo(json.dumps(load_result.as_record(result), indent=1) if as_json else load_result.as_text(result))
    raise typer.Exit(1 if load_result.complaints(result) else 0)
