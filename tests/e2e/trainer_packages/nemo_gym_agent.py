"""NeMo Gym's SimpleAgent with the grading service as its resources server, and a model that answers as it is told.

nemo_gym_agent.py HOST PORT AT_ONCE: reads rows from stdin, one a line, whose `answer` is the model's answer. HOST may
be `any:TOKEN@name`. Prints `answers`, [status of /run, reward or null] of each row; `kept`, the keys of the first
model's message that came back; and `statistics`, the answer to /aggregate_metrics.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI
from nemo_gym.config_types import BaseServerConfig, ModelServerRef, ResourcesServerRef
from nemo_gym.server_utils import (
    GlobalAIOHTTPAsyncClientConfig,
    ServerClient,
    get_global_aiohttp_client,
    set_global_aiohttp_client,
)
from omegaconf import OmegaConf
from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig


def model_app() -> FastAPI:
    """The model: its answer is the last message of the prompt, with token ids as NeMo RL's model server sends them."""
    app = FastAPI()

    @app.post("/v1/responses")
    async def responses(body: dict[str, Any]) -> dict[str, Any]:
        parts = [{"type": "output_text", "text": body["input"][-1]["content"], "annotations": []}]
        message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": parts}
        tokens = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 4], "generation_log_probs": [-0.25, -1e-7]}
        return {
            "id": "r", "created_at": 0.0, "model": "m", "object": "response", "output": [message | tokens],
            "parallel_tool_calls": False, "tool_choice": "auto", "tools": [],
        }  # fmt: skip

    return app


async def started(app: FastAPI, listener: socket.socket) -> uvicorn.Server:
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
        assert not task.done()
    return server


def listening() -> tuple[socket.socket, int]:
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, listener.getsockname()[1]


async def main(host: str, port: str, at_once: int) -> None:
    set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig())
    listeners = {name: listening() for name in ("agent", "model")}
    ports = {name: ("127.0.0.1", found[1]) for name, found in listeners.items()} | {"grader": (host, int(port))}
    kinds = {"agent": "responses_api_agents", "model": "responses_api_models", "grader": "resources_servers"}
    servers = {name: {kinds[name]: {"x": {"host": at[0], "port": at[1]}}} for name, at in ports.items()}
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=OmegaConf.create(servers)
    )
    config = SimpleAgentConfig(
        host="127.0.0.1",
        port=ports["agent"][1],
        entrypoint="app.py",
        name="agent",
        resources_server=ResourcesServerRef(type="resources_servers", name="grader"),
        model_server=ModelServerRef(type="responses_api_models", name="model"),
    )
    apps = {"agent": SimpleAgent(config=config, server_client=client).setup_webserver(), "model": model_app()}
    running = [await started(app, listeners[name][0]) for name, app in apps.items()]
    places, found = asyncio.Semaphore(at_once), []

    async def one(row: dict[str, Any]) -> dict[str, Any]:
        row["responses_create_params"] = {"input": [{"role": "user", "content": row.pop("answer")}]}
        async with places:
            answer = await client.post("agent", "/run", json=row)
        return {"status": answer.status, **(await answer.json() if answer.status == 200 else {})}

    found = await asyncio.gather(*(one(json.loads(line)) for line in sys.stdin))
    right = [{**one, "_ng_task_index": index} for index, one in enumerate(found) if "reward" in one]
    statistics = await client.post("agent", "/aggregate_metrics", json={"verify_responses": right})
    kept = sorted(right[0]["response"]["output"][0]) if right else []
    print(
        "OUTPUT "
        + json.dumps(
            {
                "answers": [[one["status"], one.get("reward")] for one in found],
                "kept": kept,
                "statistics": await statistics.json() if statistics.status == 200 else statistics.status,
            }
        )
    )
    for server in running:
        server.should_exit = True
    await get_global_aiohttp_client().close()


asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
