"""The same requests to the grading service and to NeMo Gym's own server code_gen, which needs Ray.

nemo_gym_code_gen.py URL AT_ONCE NUM_ALONE: reads the bodies for /verify from stdin, one a line. Prints the reward and
the result of each by both, and the seconds that each took: for the first NUM_ALONE one after the other, and for all
with AT_ONCE at a time.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import uvicorn
from fastapi import FastAPI

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


def code_gen_app() -> FastAPI:
    """The server with its own default configuration, as configs/code_gen.yaml has it."""
    import resources_servers
    from nemo_gym.server_utils import ServerClient

    sys.path.insert(0, str(Path(next(iter(resources_servers.__path__))) / "code_gen"))
    module: Any = importlib.import_module("app")
    config = module.CompCodingResourcesServerConfig(
        host="127.0.0.1",
        port=0,
        entrypoint="app.py",
        name="code_gen",
        num_processes=8,
        unit_test_timeout_secs=10,
        debug=False,
    )
    server = module.CompCodingResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))
    return server.setup_webserver()  # type: ignore[no-any-return]


async def verified(url: str, bodies: list[bytes], at_once: int) -> tuple[list[Any], float]:
    places, begun = asyncio.Semaphore(at_once), time.monotonic()

    async def one(client: httpx.AsyncClient, body: bytes) -> list[Any]:
        async with places:
            answer = await client.post("/verify", content=body, headers={"content-type": "application/json"})
        record = answer.json() if answer.status_code == 200 else {}
        return [record.get("reward"), record.get("result") if record else answer.status_code]

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        found = await asyncio.gather(*(one(client, body) for body in bodies))
    return found, time.monotonic() - begun


def start_ray(tries: int = 5) -> None:
    """Ray gives its own processes 15 s to start, which a busy machine does not always hold."""
    import ray

    for number in range(tries):
        try:
            ray.init(include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
            return
        except Exception:
            ray.shutdown()
            if number == tries - 1:
                raise


async def main(url: str, at_once: int, num_alone: int) -> None:
    bodies = [line for line in sys.stdin.buffer if line.strip()]
    start_ray()
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(code_gen_app(), log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    urls = {"ours": url, "theirs": f"http://127.0.0.1:{listener.getsockname()[1]}"}
    for each in urls.values():
        await verified(each, bodies[:at_once], at_once)  # Ray's workers have started
    found: dict[str, Any] = {}
    for name, each in urls.items():
        _, alone_s = await verified(each, bodies[:num_alone], 1)
        answers, together_s = await verified(each, bodies, at_once)
        found[name] = {"answers": answers, "alone_s": alone_s, "together_s": together_s}
    server.should_exit = True
    await serving
    print("OUTPUT " + json.dumps(found))


asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
