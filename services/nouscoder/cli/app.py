"""The command line: parses the command, imports its modules, then calls it."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from typing import Annotated

import typer

from nouscoder import __version__
from nouscoder.atomic_files import storage_fault
from nouscoder.cli import cluster, evaluate, grade, operate, recipes, run, runs, serve, sft, status
from nouscoder.errors import ExitCode, NousCoderError, Unusable, first_error, for_terminal, without_secrets
from nouscoder.extras import as_missing_extra
from nouscoder.installation import has_trainer
from nouscoder.logs import show_logs_to_a_person
from nouscoder.private_folder import NoFolder, writable_cache

# Products beside the core: only this table names them, and the core imports none of them, as import-linter checks. Each
# has its extra in pyproject.toml. A value is MODULE:NAME of a command or of a group of commands.
ROOMS = {
    "bench": "nouscoder.cli.bench:bench_app",
    "data": "nouscoder.cli.data:data_app",
    "reward-model": "nouscoder.cli.reward_model:reward_model_app",
    "self-play": "nouscoder.cli.self_play:self_play",
}

app = typer.Typer(
    name="nouscoder",
    help="Reinforcement learning of code models on verifiable problems, and the grading service it needs.",
    epilog="Exit codes: " + ", ".join(f"{code.value} {code.name.lower().replace('_', ' ')}" for code in ExitCode),
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
    *(run.demo, run.init, run.train, run.prepare_run, serve.serve, grade.grade, grade.prepare),
    *(runs.export, status.status, status.why_stalled, status.doctor, cluster.logs, cluster.pages),
    *(operate.pause, operate.resume, operate.drain),
):
    app.command()(_command)
app.add_typer(grade.tokens_app, name="tokens")
app.add_typer(operate.letters_app, name="dead-letters")
app.add_typer(operate.batch_app, name="batch")
app.add_typer(evaluate.eval_app, name="eval")
app.add_typer(sft.sft_app, name="sft")
app.add_typer(runs.runs_app, name="runs")
app.add_typer(runs.report_app, name="report")
app.add_typer(runs.objectives_app, name="objectives")
app.add_typer(recipes.plan_app, name="plan")
app.add_typer(recipes.recipes_app, name="recipes")
app.add_typer(run.model_app, name="model")
for _name, _place in ROOMS.items():
    _module, _, _attribute = _place.partition(":")
    _room = getattr(import_module(_module), _attribute)
    if isinstance(_room, typer.Typer):
        app.add_typer(_room, name=_name)
    else:
        app.command(_name)(_room)
if not has_trainer():
    _of_grader = (serve.serve, grade.grade, grade.prepare, status.doctor)
    app.registered_commands = [each for each in app.registered_commands if each.callback in _of_grader]
    app.registered_groups = [each for each in app.registered_groups if each.name in ("tokens", "data")]


def _for_people(error: BaseException) -> BaseException:
    """The error of one sentence that an unexpected one stands for; else the same error."""
    fault = first_error(error)
    if isinstance(fault, UnicodeEncodeError) and (fault.encoding == "ascii" or not "".join(sys.argv).isprintable()):
        return Unusable("a name or a text has characters that this locale has not: set LC_ALL=C.UTF-8")
    return storage_fault(fault) or as_missing_extra(fault, "".join(sys.argv[1:2]))


def main() -> None:
    """Entry point. A NousCoderError, a missing package or a fault of a disk is one line, and its kind the exit code."""
    # By default torch takes compiled code from a folder in /tmp with a name that everybody knows.
    with suppress(NoFolder):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(writable_cache("torch")))
    show_logs_to_a_person()  # a service writes JSON lines in their place
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # else Python does it after the exit code is set, with a traceback
    except SystemExit as ended:
        if interrupt := _interrupt_in(ended):
            print("; ".join(["nouscoder: interrupted", *getattr(interrupt, "__notes__", [])]), file=sys.stderr)  # noqa: T201
        raise
    except Exception as error:
        fault = _for_people(error)
        try:
            sys.stdout.flush()
        except OSError:  # what could not be written is not tried again at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(fault, NousCoderError):
            print(for_terminal("".join(traceback.format_exception(error))), end="", file=sys.stderr)  # noqa: T201
            sys.exit(ExitCode.FAILED)
        print(f"nouscoder: {for_terminal(without_secrets(str(fault)))}", file=sys.stderr)  # noqa: T201
        sys.exit(fault.exit_code)


def _interrupt_in(error: BaseException | None) -> KeyboardInterrupt | None:
    """The KeyboardInterrupt that typer has made an exit code of."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error
