"""`nouscoder status`, `why-stalled` and `doctor`: the state of a run and of its machines."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from nouscoder.cli.options import ConfigOption, JsonOption, SetOption

BrokerOption = Annotated[
    str, typer.Option("--broker", help="address of the broker, host:port; default: the configuration's")
]


def status(
    address: BrokerOption = "",
    config_file: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the state of every rollout of a run."""
    from nouscoder.cli.status_text import status_text
    from nouscoder.config import load_config

    config = load_config(config_file, [*(overrides or []), *broker_at(address)])
    typer.echo(asyncio.run(status_text(config, as_json=as_json)))


def why_stalled(
    address: BrokerOption = "",
    config_file: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what blocks the next step."""
    from nouscoder.cli.status_text import why_stalled_text
    from nouscoder.config import load_config

    config = load_config(config_file, [*(overrides or []), *broker_at(address)])
    typer.echo(asyncio.run(why_stalled_text(config, as_json=as_json)))


def broker_at(address: str) -> list[str]:
    """The override that `--broker` means."""
    return [f'broker.grpc="{address}"'] if address else []


def doctor(
    cluster: Annotated[bool, typer.Option("--cluster", help="check the Kubernetes cluster of KUBECONFIG")] = False,
    image: Annotated[
        str, typer.Option(help="with --cluster: image with python3 for the trial pods; default: the verifier's")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Check what this host or cluster can run, and show how to get what is missing. Exit code 0 if the defaults run."""
    if cluster:
        from nouscoder.doctor.cluster.judge import DEFAULT_IMAGE, run_doctor_cluster

        text, code = run_doctor_cluster(image or DEFAULT_IMAGE, as_json=as_json)
    else:
        from nouscoder.doctor.host import run_doctor

        text, code = run_doctor(as_json=as_json)
    typer.echo(text)
    raise typer.Exit(code)
