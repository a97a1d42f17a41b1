"""The remote reward of Miles and slime, by hand: JSON in, JSON out."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from nouscoder.http_server.listener import start_http
from nouscoder.verifier.api.remote_rewards import add_remote_rm
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.base import SandboxError
from nouscoder.verifier.sandbox.fake import FakeSandbox, ended

PAIRS = {"inputs": ["a", "b"], "outputs": ["a", "b"]}


def breaks(stdin: bytes) -> Any:
    raise SandboxError("broken")


@pytest.fixture
async def service() -> AsyncIterator[tuple[httpx.AsyncClient, DrainState]]:
    """A service whose programs echo their input; two of them do not."""
    sandbox, registry, state = FakeSandbox({"wrong = 1": lambda _: ended(b"x"), "broken = 1": breaks}), *parts()
    await sandbox.start()
    grader = Grader(sandbox, VerifierMetrics(registry))
    app = make_app(grader, registry, state, 100_000)
    add_remote_rm(app, grader, state.enter, 100_000)
    async with AsyncExitStack() as stack:
        url = "http://" + await start_http(app, "127.0.0.1:0", stack)
        yield await stack.enter_async_context(httpx.AsyncClient(base_url=url)), state


def parts() -> tuple[CollectorRegistry, DrainState]:
    return CollectorRegistry(), DrainState()


def sample(code: str, label: object = PAIRS) -> dict[str, Any]:
    """What Miles sends; the prompt holds a program that is not graded."""
    return {"prompt": "```python\nwrong = 1\n```", "response": f"```python\n{code}\n```", "label": label}


@pytest.mark.parametrize("label", [PAIRS, json.dumps(PAIRS), {"tests": PAIRS, "language": "python"}])
async def test_a_response_is_graded_by_the_tests_of_its_label(
    service: tuple[httpx.AsyncClient, DrainState], label: object
) -> None:
    http, _ = service
    right = await http.post("/remote_rm", json=sample("1", label))
    assert right.json() == {"reward": 1.0, "accepted": 1.0, "score": 1.0, "verdict": "accepted"}
    wrong = await http.post("/remote_rm", json=sample("wrong = 1", label))
    assert wrong.json() == {"reward": -1.0, "accepted": 0.0, "score": 0.0, "verdict": "wrong_answer"}
    none = await http.post("/remote_rm", json={"response": "I do not know.", "label": label})
    assert none.json()["verdict"] == "no_code"
    assert none.json()["reward"] == -1.0


async def test_our_failures_have_no_reward_and_a_status_that_miles_raises_for(
    service: tuple[httpx.AsyncClient, DrainState],
) -> None:
    http, state = service
    broken = await http.post("/remote_rm", json=sample("broken = 1"))
    state.start()
    drains = await http.post("/remote_rm", json=sample("1"))
    for answer in (broken, drains):
        assert answer.status_code == 503
        assert "reward" not in answer.json()


async def test_a_label_that_holds_no_tests_is_named(service: tuple[httpx.AsyncClient, DrainState]) -> None:
    http, _ = service
    for label, said in (("{", "label.tests: is not JSON"), ({"inputs": ["a"]}, "label.tests"), (None, "label")):
        answer = await http.post("/remote_rm", json=sample("1", label))
        assert answer.status_code == 422, answer.text
        assert said in answer.text
