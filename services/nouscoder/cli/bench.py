"""`nouscoder bench`: figures and their controls, measured in the same run."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from nouscoder.cli.options import JsonOption, SetOption, only_with, say
from nouscoder.config import load_config
from nouscoder.errors import ExitCode

bench_app = typer.Typer(no_args_is_help=True, help="Figures and their controls, measured in the same run.")


def _show(result: Any, as_text: Callable[[Any], str], as_json: bool) -> None:
    """Print a result for scripts or for people."""
    from nouscoder.bench.measuring import as_record

    say(json.dumps(as_record(result), indent=1) if as_json else as_text(result))


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
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Grade through the REST API under load, compared with bare interpreter spawns."""
    import uvloop

    from nouscoder.bench import peers, verifier

    compared = [peers.peer_of(each) for each in peer or ()]
    result = uvloop.run(verifier.bench_verifier(tuple(overrides or ()), scale, peers=compared, processes=processes))
    _show(result, verifier.as_text, as_json)


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
    only_with("a benchmark without --many", not many, "--batch", "--scale")
    if many:
        from nouscoder.bench import broker_many

        points = asyncio.run(broker_many.bench_many(many))
        _show(points, broker_many.as_text, as_json)
        return
    from nouscoder.bench import broker

    result = asyncio.run(broker.bench_broker(batch, scale))
    _show(result, broker.as_text, as_json)


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
    r"""Train a batch of random rollouts, compared with a bare forward and backward pass on the same tokens.

    With --shape the settings are those of \[learner], such as --set learner.device=cuda.
    """
    only_with("--shape", shape, "--row-tokens", "--rows", "--sequences", "--context", "--limit", "--set")
    only_with("--context", context, "--limit")
    only_with("a benchmark without --shape", not shape, "--threads")
    if shape:
        from nouscoder.bench import learner_step

        load = learner_step.StepLoad(shape, row_tokens, rows, sequences, rounds, context, limit)
        config = load_config(None, [*learner_step.defaults(load), *(overrides or ())])
        found = learner_step.bench_step(load, config, partial(say, err=as_json))
        if as_json:
            _show(found, str, as_json)
        return
    from nouscoder.bench import learner

    result = learner.bench_learner(rounds, threads)
    _show(result, learner.as_text, as_json)


@bench_app.command("generation")
def bench_generation(
    engine: Annotated[str, typer.Option(help="torch, vllm or fake")] = "torch",
    seconds: Annotated[float, typer.Option(min=0.5, help="duration of a window")] = 10.0,
    python: Annotated[str | None, typer.Option(help="the Python that has the engine; default: this one")] = None,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Sample rollouts through service and broker, compared with the engine alone: updates, and a slow verifier."""
    from nouscoder.bench import generation

    if python and not shutil.which(python):
        raise typer.BadParameter(f"{python} is no program here", param_hint="--python")
    result = asyncio.run(generation.bench_generation(engine, seconds, python or sys.executable, tuple(overrides or ())))
    _show(result, generation.as_text, as_json)


@bench_app.command("chaos")
def bench_chaos(
    minutes: Annotated[float, typer.Option(min=0.1, help="how long services and Redis fail at random")] = 5.0,
    seed: Annotated[int, typer.Option(min=0, help="decides the faults and their order")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Make the services and the Redis of a run fail in every known way. Exit code 0 if the run holds."""
    from nouscoder.bench import chaos

    result = asyncio.run(chaos.bench_chaos(minutes, seed, lambda line: say(line, err=True)))
    _show(result, chaos.as_text, as_json)
    raise typer.Exit(ExitCode.NO if result.complaints else ExitCode.OK)
