"""Each adapter, called as its trainer calls it, with a real service; and no failure becomes a reward."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from nouscoder.client import (
    AsyncClient,
    AuthenticationFailed,
    BadRequest,
    Client,
    GradingFailed,
    Patience,
    Unreachable,
)
from nouscoder.client.adapters import atropos, nemo_gym, text_of, trl, verifiers, verl
from nouscoder.http_server.api_keys import ApiKeys
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
        assert await reward(completions=texts[:3], tests=[PAIRS] * 3) == expected[:3]
        assert await reward(completions=texts, **columns) == expected
        assert await reward(completions=[message(text) for text in texts], **columns) == expected
        as_text = {**columns, "tests": [json.dumps(PAIRS)] * 5}
        assert await reward(completions=[RIGHT] * 5, **as_text) == [1.0] * 5


def test_trls_synchronous_function_gives_none_while_the_service_is_busy_and_raises_what_every_request_has() -> None:
    for status in (429, 503, 413):
        with Client("http://x", IMPATIENT, transport=failing(status)) as client:
            assert trl.reward_fn(client)(completions=[RIGHT] * 3, tests=[PAIRS] * 3) == [None] * 3
    with Client("http://x", IMPATIENT, transport=failing(401)) as client, pytest.raises(AuthenticationFailed):
        trl.reward_fn(client)(completions=[RIGHT], tests=[PAIRS])
    with pytest.raises(ValueError, match="zip"):
        trl.reward_fn(Client("http://x"))(completions=[RIGHT] * 2, tests=[PAIRS])


async def test_a_fault_of_the_data_set_ends_trls_first_batch_and_is_named_later(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Every completion got None, and the log said `no reward` for each, without the field at fault."""
    misspelt = {"inputs": ["a"], "outptus": ["a"]}
    async with AsyncClient(url, IMPATIENT) as client:
        for tests in ([misspelt] * 2, [PAIRS, misspelt], [PAIRS, "not tests"]):
            with pytest.raises(BadRequest, match="HTTP 422: tests"):
                await trl.async_reward_fn(client)(completions=[RIGHT] * 2, tests=tests)
        reward = trl.async_reward_fn(client)
        assert await reward(completions=[RIGHT], tests=[PAIRS]) == [1.0]
        assert await reward(completions=[RIGHT] * 3, tests=[PAIRS, misspelt, misspelt]) == [1.0, None, None]
        with pytest.raises(BadRequest, match="HTTP 422: tests"):  # nothing of the batch can be learnt from
            await reward(completions=[RIGHT] * 2, tests=[misspelt] * 2)
    (line,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert line.startswith("no reward for 2 of 3 completions: HTTP 422: tests")


def test_trls_first_batch_ends_when_no_service_was_ever_there_and_a_later_one_does_not() -> None:
    fates: list[int] = []

    def reply(request: httpx.Request) -> httpx.Response:
        if fates.pop(0) == 0:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json={"verdict": "accepted", "reward": 1.0, "detail": ""})

    with Client("http://x", IMPATIENT, transport=httpx.MockTransport(reply)) as client:
        fates += [0, 0]
        with pytest.raises(Unreachable, match="refused"):
            trl.reward_fn(client)(completions=[RIGHT] * 2, tests=[PAIRS] * 2)
        reward = trl.reward_fn(client)
        fates += [200, 0, 0]
        assert reward(completions=[RIGHT], tests=[PAIRS]) == [1.0]
        assert reward(completions=[RIGHT] * 2, tests=[PAIRS] * 2) == [None, None]
    for status in (404, 405):
        with Client("http://x", IMPATIENT, transport=failing(status)) as client, pytest.raises(BadRequest):
            trl.reward_fn(client)(completions=[RIGHT], tests=[PAIRS])


async def test_trl_sends_the_end_of_a_prompt_that_may_have_opened_the_reasoning(url: str) -> None:
    async with AsyncClient(url, IMPATIENT) as client:
        reward = trl.async_reward_fn(client)
        asked = {"role": "user", "content": "Write it.<think>"}
        prompts = ["Write it.<think>\n", "Write it.", [asked], [asked, {"role": "assistant", "content": "<think>"}]]
        assert await reward(completions=[RIGHT] * 4, tests=[PAIRS] * 4, prompts=prompts) == [-1.0, 1.0, 1.0, -1.0]


async def test_the_other_adapters_name_a_fault_of_the_data_set(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """verifiers takes an error for a reward of 0, so its adapter says the reason in the log and sets the error."""
    misspelt = {"inputs": ["a"], "outptus": ["a"]}
    async with AsyncClient(url, IMPATIENT) as client:
        with pytest.raises(BadRequest, match="HTTP 422: tests"):
            await atropos.run_test(client, {"tests": misspelt}, "1")
        with pytest.raises(BadRequest, match="HTTP 422: tests"):
            await nemo_gym.reward(client, {"output": None}, misspelt)
        reward = verifiers.code_reward(client)
        state: dict[str, Any] = {}
        for _ in range(2):
            assert await reward(completion=message(RIGHT), info={"tests": misspelt}, state=state) == 0.0
    assert isinstance(state["error"], BadRequest)
    (line,) = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert line.startswith("no reward: HTTP 422: tests")


async def test_openrlhfs_refusal_is_in_the_services_log(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """OpenRLHF shows the status alone."""
    await ask(url, [RIGHT], [json.dumps({"inputs": ["a"], "outptus": ["a"]})])
    (line,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert line.getMessage() == "a request for rewards is refused"
    assert vars(line)["field"].startswith("labels[0].tests") or vars(line)["field"].startswith("tests")
    assert vars(line)["reason"]


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


PROMPT = "user: Print your input.\n```python\nwrong = 1\n```\nassistant: "
LABEL = json.dumps(PAIRS)


async def ask(url: str, answers: list[str], labels: list[Any], **more: Any) -> httpx.Response:
    """One request as OpenRLHF sends it."""
    record = {"query": [PROMPT + text for text in answers], "prompts": [PROMPT] * len(answers), "labels": labels}
    async with httpx.AsyncClient() as http:
        return await http.post(f"{url}/get_reward", json=record | more)


async def test_openrlhf_gets_rewards_in_order_of_the_answer_alone(url: str) -> None:
    answer = await ask(url, [RIGHT, WRONG, NO_CODE, RIGHT], [LABEL] * 3 + [PAIRS])
    assert answer.status_code == 200, answer.text
    assert answer.json() == {
        "rewards": [1.0, -1.0, -1.0, 1.0],
        "scores": [1.0, 0.0, 0.0, 1.0],
        "extra_logs": {"accepted": [1.0, 0.0, 0.0, 1.0]},
    }
    cut = (PROMPT * 9)[50:]
    answer = await ask(url, [RIGHT], [LABEL], query=[cut + RIGHT], prompts=[PROMPT * 9])
    assert answer.json()["rewards"] == [1.0], "a prompt that the model did not see as a whole"
    fields = json.dumps({"tests": PAIRS, "language": "cobol"})
    for labels, more, field in (
        ([LABEL], {"prompts": []}, "body"),
        ([LABEL], {"query": ["other " * 50]}, "labels[0].query"),
        (["not JSON"], {}, "labels[0].tests"),
        ([fields], {}, "language"),
        ([""] * 2000, {"query": ["a"] * 2000, "prompts": [""] * 2000}, "query"),
    ):
        answer = await ask(url, [RIGHT], labels, **more)
        assert (answer.status_code, answer.json()["field"]) == (422, field), answer.text


async def test_openrlhf_gets_a_failure_of_the_service_as_a_status_that_it_repeats(url: str) -> None:
    answer = await ask(url, [RIGHT, BROKEN], [LABEL] * 2)
    assert answer.status_code == 503
    assert answer.json()["detail"] == "the grading service failed: broken"


async def test_a_token_may_be_the_password_of_a_url(tmp_path: Path) -> None:
    keys = f"trainer:{hashlib.sha256(b's3cret').hexdigest()}"
    sandbox, registry = FakeSandbox(), CollectorRegistry()
    await sandbox.start()
    app = make_app(Grader(sandbox, VerifierMetrics(registry)), registry, DrainState(), 9000, ApiKeys(environment=keys))
    async with AsyncExitStack() as stack:
        address = await start_http(app, "127.0.0.1:0", stack)
        assert (await ask(f"http://any:s3cret@{address}", [RIGHT], [LABEL])).json()["rewards"] == [1.0]
        for wrong in (f"http://any:other@{address}", f"http://s3cret@{address}", f"http://{address}"):
            assert (await ask(wrong, [RIGHT], [LABEL])).status_code == 401
        async with httpx.AsyncClient() as http:
            answer = await http.get(f"http://{address}/metrics", headers={b"Authorization": b"Basic ====\xff"})
            assert answer.status_code == 401


async def test_nemo_gym_gets_1_and_0_and_an_error_without_a_verdict(url: str) -> None:
    def response(text: str) -> dict[str, Any]:
        parts = [{"type": "output_text", "text": text, "annotations": []}, {"type": "refusal", "refusal": "no"}]
        answer = {"type": "message", "role": "assistant", "content": parts}
        call = {"type": "function_call", "name": "run", "arguments": "{}"}
        return {"output": [{"type": "reasoning", "summary": []}, answer, call]}

    async with AsyncClient(url, IMPATIENT) as client:
        scores = [await nemo_gym.reward(client, response(text), PAIRS) for text in (RIGHT, WRONG, NO_CODE)]
        assert scores == [1.0, 0.0, 0.0]
        assert await nemo_gym.reward(client, {"output": None}, PAIRS) == 0.0
        with pytest.raises(GradingFailed, match="internal_error"):
            await nemo_gym.reward(client, response(BROKEN), PAIRS)


def test_the_text_of_a_completion_is_the_last_message_of_the_assistant() -> None:
    turns = [*message("first"), {"role": "tool", "content": "42"}, *message("last"), {"role": "user", "content": "?"}]
    assert text_of("plain") == "plain"
    assert text_of(turns) == "last"
    assert text_of([{"role": "assistant", "content": None}]) == ""
    assert text_of([]) == ""
    assert text_of([{"role": "assistant", "content": [{"type": "text", "text": RIGHT}]}]) == RIGHT, "TRL's parts"
