"""`nouscoder status`, `why-stalled` and `doctor`: the state of a run and of its machines."""

from __future__ import annotations

import asyncio
import json
import shlex
import socket
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nouscoder.cli.cluster import ClusterOption, NamespaceOption, ReleaseOption, broker_of_release, release_of
from nouscoder.cli.options import ConfigOption, JsonOption, SetOption, only_with, say
from nouscoder.config import Config, load_config
from nouscoder.domain.run_status import RunStatus
from nouscoder.errors import WrongUse
from nouscoder.rpc.addresses import split_address, unix_path

if TYPE_CHECKING:
    from nouscoder.rpc.broker_client import BrokerClient

# `nouscoder status` and `nouscoder why-stalled`. Of a run that has ended both answer from its folder. They raise
# PeerError when no broker answers.

_PATIENCE_S = 3.0


def broker_of(config: Config) -> BrokerClient:
    """A client of the configured broker, with the configured certificates. Raises Unusable."""
    from nouscoder.rpc.broker_client import BrokerClient
    from nouscoder.rpc.tls import channel_credentials
    from nouscoder.rpc.worker_id import observer_id

    return BrokerClient(
        config.broker.grpc,
        observer_id("status"),
        patience_s=_PATIENCE_S,
        credentials=channel_credentials(config.tls),
        server_name=config.tls.server_name,
    )


async def status_text(config: Config, *, as_json: bool) -> str:
    """Show the state of every rollout of a run."""
    from nouscoder.rpc.channel import PeerUnreachable

    try:
        async with broker_of(config) as broker:
            status = await broker.status()
    except PeerUnreachable as silence:
        return ended_text(config, silence, as_json=as_json)
    if as_json:
        return json.dumps(asdict(status) | {"balanced": status.ledger.balanced}, indent=1)
    return "\n".join([*status_lines(status), *standing_warnings(config)])


def ended_text(config: Config, silence: Exception, *, as_json: bool) -> str:
    """What the folder says of a run that has ended or was stopped. Raises `silence`, the broker's, if there is none."""
    from nouscoder.run.standing import standing_of

    found = standing_of(config)
    if found is None:
        raise silence
    return json.dumps(asdict(found), indent=1) if as_json else "\n".join([*found.lines, *standing_warnings(config)])


def standing_warnings(config: Config) -> list[str]:
    """What the guards say of the run, where its folder is on this machine."""
    from nouscoder.run.guard_watch import GuardWatch

    return GuardWatch(config.run.folder, config.run.guards).standing


def status_lines(status: RunStatus) -> list[str]:
    """The state of the run for a person."""
    ledger = status.ledger
    return [
        f"run {status.run}: step {status.step}, {status.batches_committed} batches, policy {status.policy_version},"
        f" {f'finished: {status.finish_reason}' if status.finished else status.mode.value}",
        f"ledger: {ledger.admitted} admitted = {ledger.trained} trained + {ledger.filtered} filtered"
        f" + {ledger.stale} stale + {ledger.abandoned} abandoned + {ledger.lost} lost"
        f" + {sum(ledger.in_flight.values())} in flight"
        f" ({'balanced' if ledger.balanced else 'NOT BALANCED'})",
        *(f"  in flight, {state}: {count}" for state, count in ledger.in_flight.items() if count),
        *(
            f"stream {s.stream}: {s.lag} waiting, {s.pending} leased, {s.redeliveries} redelivered,"
            f" {s.dead_letters} given up"
            for s in status.streams
        ),
        f"graded: {status.rollouts_graded}, accepted: {status.rollouts_accepted}",
        *(f"cancelled: {rollouts} rollouts, {reason}" for reason, rollouts in status.cancelled.items()),
        *([status.back_pressure] if status.back_pressure else []),
        *_problem_lines(status),
        *(
            f"problem {problem} is gone from the problem file: {rollouts} rollouts abandoned"
            for problem, rollouts in status.missing_problems.items()
        ),
    ]


def _problem_lines(status: RunStatus) -> list[str]:
    lines = []
    if status.left_out_problems:
        known = status.num_problems + status.left_out_problems
        lines.append(
            f"left out: {status.left_out_problems} of {known} problems: their prompts are too long, or they allow a"
            " language that the run has not"
        )
    if status.refused_problems:
        lines.append(
            f"refused: {status.refused_problems} of {status.num_problems} problems, of which generation can make no"
            f" rollout, such as: {status.refused_reason}"
        )
    return lines


async def why_stalled_text(config: Config, *, as_json: bool) -> str:
    """Show what blocks the next step."""
    from nouscoder.rpc.channel import PeerUnreachable

    try:
        async with broker_of(config) as broker:
            blockers = await broker.why_stalled()
            status = await broker.status()
    except PeerUnreachable as silence:
        return ended_text(config, silence, as_json=as_json)
    if as_json:
        return json.dumps([asdict(blocker) for blocker in blockers], indent=1)
    if status.finished:
        return f"the run is finished: {status.finish_reason}"
    found = " ".join(blocker.reason for blocker in blockers) or "nothing is stalled"
    return "\n".join([found, *standing_warnings(config)])


BrokerOption = Annotated[
    str, typer.Option("--broker", help="address of the broker, host:port; default: the configuration's")
]
Answer = Coroutine[Any, Any, str]

# In a checkout, whose root is the working directory.
CHART = Path("helm/nouscoder")


def broker_at(address: str) -> list[str]:
    """The override that `--broker` means. Raises AddressError."""
    if address and unix_path(address) is None:
        split_address(address)
    return [f'broker.grpc="{address}"'] if address else []


def _newest_here(command: str) -> Path | None:
    """The configuration of the newest run in runs/, where nothing listens at the usual address of a broker.

    Raises WrongUse for a command that changes a run, which must be named, and PeerUnreachable where there is no run.
    """
    from nouscoder.rpc.channel import PeerUnreachable

    usual = Config()
    with suppress(OSError), socket.create_connection(split_address(usual.broker.grpc), _PATIENCE_S):
        return None
    found = sorted(usual.run.root.glob("*/config.toml"), key=lambda file: -file.stat().st_mtime)
    if not found:
        raise PeerUnreachable(f"no run is in {usual.run.root}/, and no broker at {usual.broker.grpc}: give --config")
    if command not in ("status", "why_stalled"):
        names = ", ".join(file.parent.name for file in found)
        raise WrongUse(f"name the run, such as --config {shlex.quote(str(found[0]))}; runs here, newest first: {names}")
    return found[0]


def asks_broker(ask: Callable[..., Answer]) -> Callable[..., None]:
    """The command that prints the answer of `ask`, which takes a configuration and `as_json` besides its own options.

    The command has the options that give both, after those of `ask`.
    """
    name = ask.__name__.removesuffix("_text")

    def command(
        address: BrokerOption = "",
        config_file: ConfigOption = None,
        overrides: SetOption = None,
        in_cluster: ClusterOption = False,
        namespace: NamespaceOption = "",
        release: ReleaseOption = "",
        as_json: JsonOption = False,
        **own: Any,
    ) -> None:
        only_with("--cluster", in_cluster, "--namespace", "--release")
        only_with("a broker outside --cluster", not in_cluster, "--broker")
        reached: AbstractContextManager[list[str]] = nullcontext([])
        if in_cluster:
            reached = broker_of_release(release_of(namespace, release), as_json=as_json)
        with reached as broker:
            config_file = config_file if config_file or overrides or address or broker else _newest_here(name)
            config = load_config(config_file, [*(overrides or []), *broker_at(address), *broker])
            say(asyncio.run(ask(config, **own, as_json=as_json)))

    _, *own, _ = signature(ask, eval_str=True).parameters.values()
    *common, _ = signature(command, eval_str=True).parameters.values()
    command.__name__, command.__doc__ = name, ask.__doc__
    command.__annotations__ = {each.name: each.annotation for each in [*own, *common]}
    vars(command)["__signature__"] = Signature([*own, *common])  # typer reads both
    return command


status, why_stalled = asks_broker(status_text), asks_broker(why_stalled_text)


def doctor(
    cluster: Annotated[bool, typer.Option("--cluster", help="check the Kubernetes cluster of KUBECONFIG")] = False,
    image: Annotated[
        str, typer.Option(help="with --cluster: image with python3 for the trial pods; default: the verifier's")
    ] = "",
    values: Annotated[
        list[Path] | None,
        typer.Option(
            "--values",
            "-f",
            exists=True,
            dir_okay=False,
            help="with --cluster: try the pods of an install with these values in dry runs; nothing is changed",
        ),
    ] = None,
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", help="with --values: of the install; default: nouscoder")
    ] = "",
    release: Annotated[str, typer.Option(help="with --values: name of the install; default: nouscoder")] = "",
    chart: Annotated[
        Path | None, typer.Option(exists=True, help=f"with --values: folder or archive of the chart; default: {CHART}")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check what this host or cluster can run, and show how to get what is missing. Exit code 0 if the defaults run."""
    only_with("--cluster", cluster, "--values", "--image")
    only_with("--cluster without --values, which starts no pod", not values, "--image")
    only_with("--cluster with --values", values, "--namespace", "--release", "--chart")
    if cluster:
        from nouscoder.doctor.cluster.install import run_doctor_install
        from nouscoder.doctor.cluster.judge import DEFAULT_IMAGE, run_doctor_cluster
        from nouscoder.doctor.cluster.rendered import Release

        if values:
            asked = Release(release or "nouscoder", namespace or "nouscoder", chart or CHART, tuple(values))
            text, code = run_doctor_install(asked, as_json=as_json)
        else:
            text, code = run_doctor_cluster(image or DEFAULT_IMAGE, as_json=as_json)
    else:
        from nouscoder.doctor.host import run_doctor

        text, code = run_doctor(as_json=as_json)
    say(text)
    raise typer.Exit(code)
