"""Each adapter, called as its trainer calls it, with a real service; and no failure becomes a reward."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from nouscoder.client import AsyncClient, AuthenticationFailed, Client, GradingFailed, Patience, Unreachable
from nouscoder.client.adapters import atropos, trl, verifiers, verl
from nouscoder.client.adapters.rewards import text_of
from nouscoder.http_server.listener import start_http
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.base import SandboxError
from nouscoder.verifier.sandbox.fake import FakeSandbox, ended

RIGHT, WRONG, NO_CODE = "```python\n1\n```", "```python\nwrong = 1\n```", ""
BROKEN = "```python\nbroken = 1\n```"
PAIRS = {"inputs": ["a", "b"], "outputs": ["a", "b"]}
IMPATIENT = Patience(busy_s=0.0, unreachable_s=0.0, internal_retries=0)


def breaks(stdin: bytes) -> Any:
    raise SandboxError("broken")


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """A service whose programs echo their input; two of them do not."""
    table: dict[str, Callable[[bytes], Any]] = {
        "wrong = 1": lambda stdin: ended(b"other"),
        "broken = 1": breaks,
    }
    sandbox, registry = FakeSandbox(table), CollectorRegistry()
    await sandbox.start()
    app = make_app(Grader(sandbox, VerifierMetrics(registry)), registry, DrainState(), 100_000)
    async with AsyncExitStack() as stack:
        yield "http://" + await start_http(app, "127.0.0.1:0", stack)


def message(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def failing(status: int) -> httpx.MockTransport:
    return httpx.MockTransport(lambda request: httpx.Response(status, json={"detail": "no"}))


async def test_trl_gets_1_minus_1_and_none_for_our_failures_in_order(url: str) -> None:
    texts = [RIGHT, WRONG, NO_CODE, BROKEN, RIGHT]
    columns: dict[str, Any] = {"prompts": ["p"] * 5, "completion_ids": [[1]] * 5, "tests": [PAIRS] * 4 + ["not tests"]}
    async with AsyncClient(url, IMPATIENT) as client:
        reward = trl.async_reward_fn(client, reveal="none")
        assert inspect.iscoroutinefunction(reward)  # so TRL awaits it
        assert reward.__name__ == "code_reward"  # TRL's name of its metric
        expected = [1.0, -1.0, -1.0, None, None]
        assert await reward(completions=texts, **columns) == expected
        assert await reward(completions=[message(text) for text in texts], **columns) == expected
        as_text = {**columns, "tests": [json.dumps(PAIRS)] * 5}
        assert await reward(completions=[RIGHT] * 5, **as_text) == [1.0] * 5


def test_trls_synchronous_function_gives_none_while_the_service_is_busy_and_raises_what_every_request_has() -> None:
    for status in (429, 503, 422):
        with Client("http://x", IMPATIENT, transport=failing(status)) as client:
            assert trl.reward_fn(client)(completions=[RIGHT] * 3, tests=[PAIRS] * 3) == [None] * 3
    with Client("http://x", IMPATIENT, transport=failing(401)) as client, pytest.raises(AuthenticationFailed):
        trl.reward_fn(client)(completions=[RIGHT], tests=[PAIRS])
    with pytest.raises(ValueError, match="zip"):
        trl.reward_fn(Client("http://x"))(completions=[RIGHT] * 2, tests=[PAIRS])


async def test_verl_gets_1_and_0_and_an_error_without_a_verdict(url: str) -> None:
    def scores() -> list[float]:
        with Client(url, IMPATIENT) as client:
            with pytest.raises(GradingFailed, match="internal_error"):
                verl.compute_score(client, BROKEN, PAIRS)
            return [verl.compute_score(client, text, json.dumps(PAIRS)) for text in (RIGHT, WRONG, NO_CODE)]

    assert await asyncio.to_thread(scores) == [1.0, 0.0, 0.0]
    with Client("http://127.0.0.1:1", IMPATIENT) as client, pytest.raises(Unreachable):
        verl.compute_score(client, RIGHT, PAIRS)


async def test_verifiers_get_1_and_0_and_an_error_in_the_state_without_a_verdict(url: str) -> None:
    async with AsyncClient(url, IMPATIENT) as client:
        reward = verifiers.code_reward(client)
        # A Rubric passes only what the signature names, and takes plural names for a function of a group.
        assert list(inspect.signature(reward).parameters) == ["completion", "info", "state"]
        for text, score in ((RIGHT, 1.0), (WRONG, 0.0), (NO_CODE, 0.0)):
            for info in ({"tests": PAIRS}, json.dumps({"tests": PAIRS})):
                state: dict[str, Any] = {}
                assert await reward(completion=message(text), info=info, state=state) == score
                assert state == {}
        assert await reward(completion=message(BROKEN), info={"tests": PAIRS}, state=state) == 0.0
        assert isinstance(state["error"], GradingFailed)
        with pytest.raises(GradingFailed, match="internal_error"):
            await verifiers.score(client, BROKEN, PAIRS)


async def test_atropos_gets_booleans_that_are_all_true_only_for_a_right_program(url: str) -> None:
    tests = {"input": ["a", "b"], "output": ["a", "b"], "fn_name": "none"}
    async with AsyncClient(url, IMPATIENT) as client:
        assert await atropos.run_test(client, {"tests": tests}, "1") == (
            [True, True],
            {"error_message": "", "first_failure": None},
        )
        results, metadata = await atropos.run_test(client, {"tests": tests}, "wrong = 1")
        assert (results, metadata["error_message"]) == ([False], "wrong_answer")
        results, metadata = await atropos.run_test(client, {"tests": tests}, "not python(")
        assert (results, metadata["error_message"]) == ([False], "compile_error")
        with pytest.raises(GradingFailed, match="internal_error"):
            await atropos.run_test(client, {"tests": tests}, "broken = 1")


def test_the_text_of_a_completion_is_the_last_message_of_the_assistant() -> None:
    turns = [*message("first"), {"role": "tool", "content": "42"}, *message("last"), {"role": "user", "content": "?"}]
    assert text_of("plain") == "plain"
    assert text_of(turns) == "last"
    assert text_of([{"role": "assistant", "content": None}]) == ""
    assert text_of([]) == ""
