"""The command line: parse, then import what the command needs, then call it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nouscoder.errors import NousCoderError, Unusable
from nouscoder.shared_cores import wait_passively

app = typer.Typer(
    name="nouscoder",
    help="Reinforcement learning of code models on verifiable problems, and the grading service it needs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

ConfigOption = Annotated[Path | None, typer.Option("--config", help="TOML configuration; defaults without one")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="change one value")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON")]


class Service(StrEnum):
    """The four services."""

    VERIFIER = "verifier"
    BROKER = "broker"
    GENERATION = "generation"
    LEARNER = "learner"


@contextmanager
def _unusable_is_78() -> Iterator[None]:
    """What can never work as given is one line on stderr and exit code 78, so that nobody starts it again."""
    from nouscoder.supervisor import EXIT_UNUSABLE

    try:
        yield
    except Unusable as error:
        typer.echo(f"nouscoder: {error}", err=True)
        raise typer.Exit(EXIT_UNUSABLE) from error


@app.command()
def demo(
    seed: Annotated[int, typer.Option(min=0, help="seed of problems, policy and sampling")] = 0,
    name: Annotated[str | None, typer.Option(help="name of the run folder; default demo-SEED")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with an earlier run of this name")] = False,
    overrides: SetOption = None,
) -> None:
    """Watch a small policy learn to program: real services, real sandboxes, about five minutes on two cores."""
    from nouscoder.demo.run import demo_run

    raise typer.Exit(asyncio.run(demo_run(seed=seed, name=name, resume=resume, overrides=overrides or [])))


@app.command()
def train(
    config_file: Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML configuration of the run")],
    resume: Annotated[bool, typer.Option("--resume", help="go on with an earlier run of this name")] = False,
    overrides: SetOption = None,
) -> None:
    """Run the loop as processes on this machine, or, with run.services = "given", through services that run already."""
    from nouscoder.config import load_config
    from nouscoder.logs import configure_logs
    from nouscoder.pipeline import train as run_training

    config = load_config(config_file, overrides or [])
    if config.run.services == "given":
        configure_logs("train")
    with _unusable_is_78():
        raise typer.Exit(asyncio.run(run_training(config, resume=resume)))


class Part(StrEnum):
    """What `prepare-run` can make alone."""

    PROBLEMS = "problems"


@app.command()
def prepare_run(
    config_file: Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML configuration of the run")],
    only: Annotated[Part | None, typer.Option(help="make this alone")] = None,
    overrides: SetOption = None,
) -> None:
    """Make what a run starts from, the demo's problems and warm-started policy, where they are not there yet."""
    from nouscoder.config import load_config
    from nouscoder.demo.prepare_run import prepare_run as prepare_the_run
    from nouscoder.logs import configure_logs

    config = load_config(config_file, overrides or [])
    wait_passively()
    configure_logs("prepare-run")
    with _unusable_is_78():
        asyncio.run(prepare_the_run(config, only_problems=only is Part.PROBLEMS))


@app.command()
def serve(
    service: Annotated[Service, typer.Argument(help="which service")],
    config_file: ConfigOption = None,
    overrides: SetOption = None,
    grpc: Annotated[str | None, typer.Option(help="address of the gRPC API, host:port")] = None,
    http: Annotated[str | None, typer.Option(help="address of the REST API (verifier), host:port")] = None,
    metrics: Annotated[str | None, typer.Option(help="address of the Prometheus page, host:port")] = None,
    broker: Annotated[bool, typer.Option("--broker", help="verifier: grade the broker's rollouts too")] = False,
) -> None:
    """Run one service until SIGTERM."""
    from nouscoder.config import load_config
    from nouscoder.logs import configure_logs

    given = {"grpc": grpc, "http": http, "metrics": metrics}
    addresses = [f'{service.value}.{key}="{value}"' for key, value in given.items() if value is not None]
    config = load_config(config_file, [*(overrides or []), *addresses])
    wait_passively()
    configure_logs(service.value)
    with _unusable_is_78():
        if service is Service.VERIFIER:
            import uvloop

            from nouscoder.verifier.service import serve as serve_verifier

            uvloop.run(serve_verifier(config, with_broker=broker))
        elif service is Service.BROKER:
            from nouscoder.broker.service import serve as serve_broker

            asyncio.run(serve_broker(config))
        elif service is Service.GENERATION:
            from nouscoder.generation.service import serve as serve_generation

            asyncio.run(serve_generation(config))
        else:
            from nouscoder.learner.service import serve as serve_learner

            asyncio.run(serve_learner(config))


@app.command()
def grade(
    file: Annotated[Path, typer.Argument(help="JSONL, a submission a line, in the form of POST /v1/grade")],
    out: Annotated[Path | None, typer.Option(help="JSONL of verdicts; default stdout")] = None,
    server: Annotated[str | None, typer.Option(help="URL of a grading service; default: grade on this machine")] = None,
    config_file: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Grade a file of submissions; exit code 0 when each got a verdict that is not internal_error."""
    from nouscoder.config import load_config
    from nouscoder.grade_file import grade_file

    raise typer.Exit(grade_file(file, load_config(config_file, overrides or []), out, server))


tokens_app = typer.Typer(help="Tokens of the grading service's clients.", no_args_is_help=True)
app.add_typer(tokens_app, name="tokens")


@tokens_app.callback()
def _tokens() -> None:
    """Tokens of the grading service's clients."""


@tokens_app.command("new")
def tokens_new(name: Annotated[str, typer.Argument(help="the client's name")]) -> None:
    """Make a token: stdout gets the line to store in verifier.tokens_file, stderr the token, this once."""
    from nouscoder.verifier.tokens import new_token

    secret, line = new_token(name)
    typer.echo(f"token for {name}, shown only now: {secret}", err=True)
    typer.echo(line)


BrokerOption = Annotated[
    str, typer.Option("--broker", help="address of the broker, host:port; default: the configuration's")
]


@app.command()
def status(
    address: BrokerOption = "",
    config_file: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Where every rollout of a run is."""
    from nouscoder.cli_status import status_text
    from nouscoder.config import load_config

    config = load_config(config_file, [*(overrides or []), *_broker_at(address)])
    typer.echo(asyncio.run(status_text(config, as_json=as_json)))


@app.command()
def why_stalled(
    address: BrokerOption = "",
    config_file: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Name what blocks the next step."""
    from nouscoder.cli_status import why_stalled_text
    from nouscoder.config import load_config

    config = load_config(config_file, [*(overrides or []), *_broker_at(address)])
    typer.echo(asyncio.run(why_stalled_text(config, as_json=as_json)))


def _broker_at(address: str) -> list[str]:
    return [f'broker.grpc="{address}"'] if address else []


@app.command()
def doctor(
    cluster: Annotated[bool, typer.Option("--cluster", help="look at the Kubernetes cluster of KUBECONFIG")] = False,
    image: Annotated[
        str, typer.Option(help="with --cluster: image with python3 for the pods that are tried; default the verifier's")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """What this host or cluster can give and how to get what is missing; exit code 0 when the defaults can run."""
    if cluster:
        from nouscoder.doctor_cluster import DEFAULT_IMAGE, run_doctor_cluster

        text, code = run_doctor_cluster(image or DEFAULT_IMAGE, as_json=as_json)
    else:
        from nouscoder.doctor import run_doctor

        text, code = run_doctor(as_json=as_json)
    typer.echo(text)
    raise typer.Exit(code)


@app.command()
def prepare() -> None:
    """Do once what the sandboxes of this host need: their first process, and go's standard library, compiled."""
    from nouscoder.verifier.languages import find_installed, registry
    from nouscoder.verifier.prepared import prepare as prepare_language
    from nouscoder.verifier.sandbox.native import native_library

    typer.echo(f"init: {native_library()}")
    for language in find_installed(registry()).values():
        if language.prepare is not None:
            typer.echo(f"{language.name}: {prepare_language(language)}")


data_app = typer.Typer(no_args_is_help=True, help="Problem files.")
app.add_typer(data_app, name="data")


@data_app.callback()
def _data() -> None:
    """Problem files."""


@data_app.command("inspect")
def data_inspect(
    file: Annotated[Path, typer.Argument(help="problem file: JSONL of ours, LeetCodeDataset or CodeContests (.gz)")],
    flaky: Annotated[bool, typer.Option("--flaky", help="run the reference solutions, several times")] = False,
    rounds: Annotated[int, typer.Option(min=2, help="how often each reference runs each test")] = 5,
    as_json: JsonOption = False,
    config_file: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """What a problem file holds; with --flaky, exit code 1 when tests are found that cannot be relied on."""
    from nouscoder.config import load_config
    from nouscoder.data import inspect

    if flaky:
        section = load_config(config_file, overrides or []).verifier
        text, code = inspect.audit_file(file, section, rounds, as_json=as_json)
    else:
        text, code = inspect.inspect_file(file, as_json=as_json)
    typer.echo(text)
    raise typer.Exit(code)


bench_app = typer.Typer(no_args_is_help=True, help="Figures beside their controls, measured in the same run.")
app.add_typer(bench_app, name="bench")


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


def main() -> None:
    """Entry point: a NousCoderError is one line on stderr and exit code 1."""
    try:
        app()
    except NousCoderError as error:
        print(f"nouscoder: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(1)
