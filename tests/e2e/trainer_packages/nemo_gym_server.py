"""The resources server of docs/trainers.md, with NeMo Gym's own classes and its web application.

Prints [[status, reward], ...] of a right program, a wrong one, and one that no service grades.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from fastapi.testclient import TestClient
from nemo_gym.base_resources_server import BaseResourcesServerConfig
from nemo_gym.openai_utils import NeMoGymResponse
from nemo_gym.server_utils import ServerClient

DOCUMENT = Path(__file__).parents[3] / "docs" / "trainers.md"
RIGHT = "```python\nprint(sum(map(int, input().split())))\n```"
WRONG = "```python\nprint(3)\n```"
TESTS = {"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10\n"]}


def documented(url: str) -> Any:
    """The class CodeServer of the document, for the service at `url`."""
    section = DOCUMENT.read_text("utf8").partition("## NeMo Gym\n")[2]
    block = re.search(r"```py\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    assert block is not None
    names: dict[str, Any] = {}
    client = 'AsyncClient("http://127.0.0.1:8080")'
    assert client in block[1]
    script = block[1].replace(client, f'AsyncClient("{url}", Patience(unreachable_s=0.0))')
    exec("from nouscoder.client import Patience\n" + script, names)  # noqa: S102  the code of our document
    return names["CodeServer"]


def body(text: str) -> dict[str, Any]:
    """A request to /verify as NeMo Gym sends it."""
    message = {
        "id": "m", "type": "message", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }  # fmt: skip
    response = NeMoGymResponse(
        id="r", created_at=0.0, model="m", object="response", output=[message], parallel_tool_calls=False,
        tool_choice="auto", tools=[],
    )  # fmt: skip
    return {"responses_create_params": {"input": "Add."}, "response": response.model_dump(), "tests": TESTS}


def verified(url: str, text: str) -> list[Any]:
    config = BaseResourcesServerConfig(host="127.0.0.1", port=0, entrypoint="", name="code")
    server = documented(url)(config=config, server_client=MagicMock(spec=ServerClient))
    with TestClient(server.setup_webserver(), raise_server_exceptions=False) as http:
        answer = http.post("/verify", json=body(text))
    return [answer.status_code, answer.json()["reward"] if answer.status_code == 200 else None]


def main(url: str) -> None:
    print(json.dumps([verified(url, RIGHT), verified(url, WRONG), verified("http://127.0.0.1:1", RIGHT)]))


main(sys.argv[1])
