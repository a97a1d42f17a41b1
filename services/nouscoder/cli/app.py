"""The command line: parses the command, imports its modules, then calls it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from nouscoder import __version__
from nouscoder.cli import (
    bench,
    data,
    evaluate,
    grade,
    objectives,
    operate,
    plan,
    reward_model,
    run,
    runs,
    self_play,
    serve,
    sft,
    status,
)
from nouscoder.errors import NousCoderError

app = typer.Typer(
    name="nouscoder",
    help="Reinforcement learning of code models on verifiable problems, and the grading service it needs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"nouscoder {__version__}")
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
]


@app.callback()
def _options(version: _Version = False) -> None:
    """Options before the command."""


for _command in (
    *(run.demo, run.init, run.train, run.prepare_run, self_play.self_play, serve.serve, grade.grade, grade.prepare),
    *(runs.export, status.status, status.why_stalled, status.doctor),
    *(operate.pause, operate.resume, operate.drain),
):
    app.command()(_command)
app.add_typer(grade.tokens_app, name="tokens")
app.add_typer(operate.letters_app, name="dead-letters")
app.add_typer(operate.batch_app, name="batch")
app.add_typer(data.data_app, name="data")
app.add_typer(evaluate.eval_app, name="eval")
app.add_typer(sft.sft_app, name="sft")
app.add_typer(bench.bench_app, name="bench")
app.add_typer(runs.runs_app, name="runs")
app.add_typer(objectives.objectives_app, name="objectives")
app.add_typer(plan.plan_app, name="plan")
app.add_typer(reward_model.reward_model_app, name="reward-model")


def main() -> None:
    """Entry point. A NousCoderError prints one line to stderr and exits with code 1."""
    try:
        app()
    except NousCoderError as error:
        print(f"nouscoder: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(1)
