"""`nouscoder serve`: one service in this process."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import Annotated

import typer

from nouscoder.cli.options import ConfigOption, SetOption, only_with
from nouscoder.config import load_config
from nouscoder.extras import MODEL_LIBRARIES, require
from nouscoder.run.supervisor import wait_passively


class Service(StrEnum):
    """The four services."""

    VERIFIER = "verifier"
    BROKER = "broker"
    GENERATION = "generation"
    LEARNER = "learner"


def serve(
    service: Annotated[Service, typer.Argument(help="the service to run")],
    config_file: ConfigOption = None,
    overrides: SetOption = None,
    grpc: Annotated[str | None, typer.Option(help="address of the gRPC API: host:port, or unix:PATH")] = None,
    http: Annotated[str | None, typer.Option(help="address of the HTTP API (verifier, generation), host:port")] = None,
    metrics: Annotated[str | None, typer.Option(help="address of the Prometheus page: host:port, or unix:PATH")] = None,
    broker: Annotated[bool, typer.Option("--broker", help="verifier: grade the broker's rollouts too")] = False,
    policy: Annotated[
        str,
        typer.Option(help="generation: folder of a model or an adapter, or ORGANISATION/MODEL; no run"),
    ] = "",
) -> None:
    """Run one service until SIGTERM."""
    from nouscoder.logs import configure_logs
    from nouscoder.run.stages import has_stages, serve_stage

    only_with("`serve verifier`", service is Service.VERIFIER, "--broker")
    only_with("`serve generation`", service is Service.GENERATION, "--policy")
    only_with("verifier and generation", service in (Service.VERIFIER, Service.GENERATION), "--http")
    of_http = "openai.http" if service is Service.GENERATION else "http"
    given = {"grpc": grpc, of_http: http, "metrics": metrics}
    addresses = [f'{service.value}.{key}="{value}"' for key, value in given.items() if value is not None]
    config = load_config(config_file, [*(overrides or []), *addresses])
    wait_passively()
    configure_logs(service.value)
    if service is Service.VERIFIER:
        import uvloop

        if config.verifier.processes > 1:
            from nouscoder.verifier.processes.parent import serve_many

            raise typer.Exit(uvloop.run(serve_many(config, with_broker=broker)))
        from nouscoder.verifier.process import serve as serve_verifier

        uvloop.run(serve_verifier(config, with_broker=broker))
    elif service is Service.BROKER:
        import uvloop

        from nouscoder.broker.process import serve as serve_broker

        uvloop.run(serve_broker(config))
    elif service is Service.GENERATION:
        require("generation", *MODEL_LIBRARIES)
        if policy:
            from nouscoder.evaluation.served_policy import serve_policy

            asyncio.run(serve_policy(config, policy))
            return
        from nouscoder.generation.process import serve as serve_generation

        if has_stages(config):
            serve_stage(config, lambda stage: asyncio.run(serve_generation(stage)), is_learner=False)
            return
        of_file = None if config_file is None else lambda: load_config(config_file, [*(overrides or []), *addresses])
        asyncio.run(serve_generation(config, of_file))
    else:
        require("learner", *MODEL_LIBRARIES)
        from nouscoder.learner.process import serve as serve_learner

        if has_stages(config):
            serve_stage(config, lambda stage: asyncio.run(serve_learner(stage)), is_learner=True)
        else:
            asyncio.run(serve_learner(config))
