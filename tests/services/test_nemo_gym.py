"""NeMo Gym's protocol by hand: JSON in, JSON out. tests/e2e/test_nemo_gym_packages.py uses the real packages."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import resource
import statistics
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from nouscoder.domain.submission import CallTests, Profile, StdinTests, Submission, TestsReference
from nouscoder.domain.verdict import FirstFailure, TestOutcome, Verdict, VerdictKind
from nouscoder.formats.sent_tests import NotTests
from nouscoder.http_server.api_keys import ApiKeys
from nouscoder.http_server.body import SMALL_BYTES
from nouscoder.http_server.listener import start_http
from nouscoder.http_server.memory_budget import MemoryBudget, MemoryBudgetExceeded
from nouscoder.store.blobs import BlobsUnavailable
from nouscoder.verifier.api.compat import gym_metrics, nemo_gym
from nouscoder.verifier.api.compat.gym_metrics import MAX_ROLLOUTS, aggregated
from nouscoder.verifier.api.compat.nemo_gym import add_nemo_gym
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.grading.grader import QueueFull

PAIRS = {"inputs": ["1 2\n"], "outputs": ["3\n"], "fn_name": None}
RIGHT, WRONG, LATE, CRASH = "```\nright\n```", "```\nwrong\n```", "```\nlate\n```", "```\ncrash\n```"
KINDS = {"right": VerdictKind.ACCEPTED, "wrong": VerdictKind.WRONG_ANSWER, "late": VerdictKind.TIME_LIMIT_EXCEEDED}
KINDS |= {"crash": VerdictKind.RUNTIME_ERROR, "lost": VerdictKind.INTERNAL_ERROR}


class Told:
    """A grader whose verdict, or error, is that of the word in the completion."""

    backend, num_slots, unfinished = "told", 1, 0

    def __init__(self) -> None:
        self.seen: list[Submission] = []
        self.errors: dict[str, Exception] = {}
        self.work_s = 0.0

    async def grade(self, submission: Submission, on_outcome: object = None) -> Verdict:
        self.seen.append(submission)
        await asyncio.sleep(self.work_s)
        word = (submission.completion or "").strip("`\n")
        if word in self.errors:
            raise self.errors[word]
        kind = KINDS.get(word, VerdictKind.NO_CODE)
        outcome = TestOutcome(0, kind, 0.5, 0.5, 1000)
        ran = word in KINDS and kind is not VerdictKind.INTERNAL_ERROR
        failure = FirstFailure(0, kind, "1 2\n", "3\n", "4\n") if ran and word != "right" else None
        passed = int(word == "right")
        tests = (outcome,) if ran else ()
        return Verdict(kind, passed, 1, len(tests), 1.0, "told", False, tests, failure, "the reason")


@asynccontextmanager
async def serving(
    told: Told, drain: DrainState | None = None, keys: str = "", budget_bytes: int = 1_000_000
) -> AsyncIterator[httpx.AsyncClient]:
    drain, api_keys, budget = drain or DrainState(), ApiKeys(environment=keys or None), MemoryBudget(budget_bytes)
    app = make_app(told, CollectorRegistry(), drain, 20_000, api_keys, budget=budget)
    add_nemo_gym(app, told, drain.enter, 20_000, budget_bytes)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gym") as client:
        yield client


def body(text: str, tests: object = PAIRS, **metadata: object) -> dict[str, Any]:
    parts = [{"type": "output_text", "text": text}, {"type": "refusal", "refusal": "no"}]
    message = {"type": "message", "role": "assistant", "content": parts, "generation_token_ids": [1, 2]}
    return {
        "responses_create_params": {"input": "Add.", "temperature": 1.0},
        "response": {"id": "r", "output": [{"type": "reasoning", "summary": []}, message], "more": {"kept": True}},
        "verifier_metadata": {"unit_tests": tests, **metadata},
        "hash_id": "of the row",
    }


async def record_of(client: httpx.AsyncClient, text: str, tests: object = PAIRS, **metadata: object) -> dict[str, Any]:
    answer = await client.post("/verify", json=body(text, tests, **metadata))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_rewards_results_and_fields_are_those_of_code_gen() -> None:
    """POST /verify answered 404."""
    told = Told()
    async with serving(told) as client:
        assert (await client.post("/seed_session", json=body(RIGHT))).json() == {}
        assert (await client.get("/reverify_mode")).json() == "stateless"
        found = {name: await record_of(client, f"```\n{name}\n```") for name in ("right", "wrong", "late", "crash")}
        found |= {"empty": await record_of(client, ""), "called": await record_of(client, WRONG, called())}
    rewards = {name: record["reward"] for name, record in found.items()}
    assert rewards == {"right": 1.0, "wrong": 0.0, "late": 0.0, "crash": 0.0, "empty": 0.0, "called": 0.0}
    results = {name: record["result"] for name, record in found.items()}
    assert results == {"right": [True], "wrong": [-2], "late": [-3], "crash": [-4], "empty": None, "called": [False]}
    assert {frozenset(record) for record in found.values()} == {frozenset(found["right"])}, "always the same metrics"
    assert found["right"]["metadata"] == {"execution time": 0.5}
    assert found["wrong"]["metadata"]["error_code"] == found["called"]["metadata"]["error_code"] == -2
    assert found["wrong"]["extracted_model_code"] == "wrong"
    assert "verifier_metadata" not in found["right"], "the tests are not sent back"
    assert told.seen[0].profile is Profile.CODE_GEN
    assert told.seen[0].limits.wall_time_s == told.seen[0].limits.cpu_time_s == 10.0
    assert isinstance(told.seen[0].tests, StdinTests)
    assert isinstance(told.seen[-1].tests, CallTests)


def called() -> dict[str, Any]:
    return {"inputs": ["[1]\n2"], "outputs": ["3"], "fn_name": "f"}


async def test_what_nobody_here_knows_comes_back_byte_for_byte() -> None:
    """Decoding and encoding loses them: huge integers, -0, 1E400, half of a surrogate pair."""
    response = (
        r'{"output": [{"type": "message", "content": [{"type": "output_text", "text": "```\nright\n```"}],'
        r' "generation_log_probs": [-0.0, -1e-7, 1E400, NaN], "ids": [123456789012345678901234567890]}],'
        r' "cut": "\ud83d", "response": {"a": "}"}}'
    )
    params, metadata = '{ "input":"\\u00e9" , "x":[ ] }', json.dumps({"unit_tests": PAIRS})
    others = f'"a": [1, {{}}],\n"verifier_metadata": {metadata}'
    text = f'{{{others}, "response" : {response}, "responses_create_params":{params}}}'
    async with serving(Told()) as client:
        answer = await client.post("/verify", content=text)
    assert answer.status_code == 200
    begin = f'{{"responses_create_params":{params},"response":{response},'
    assert answer.text.startswith(begin)
    assert json.loads("{" + answer.text.removeprefix(begin))["reward"] == 1.0


async def test_all_output_texts_are_the_answer_and_stray_tags_of_reasoning_cost_the_reward() -> None:
    told = Told()
    async with serving(told) as client:
        request = body("``")
        request["response"]["output"] += [
            {"type": "message", "content": [{"type": "output_text", "text": "`\nright\n```"}]}
        ]
        assert (await client.post("/verify", json=request)).json()["reward"] == 1.0
        assert told.seen[-1].completion == RIGHT
        for tag in ("<think>", "</think>"):
            found = (await client.post("/verify", json=thinking(RIGHT, tag * 2))).json()
            assert (found["reward"], found["reasoning_format_violation_rate"]) == (0.0, 1.0)
            assert (await client.post("/verify", json=thinking(RIGHT, tag))).json()["reward"] == 1.0
        assert (await record_of(client, RIGHT + "</think>"))["reward"] == 0.0


async def test_parts_of_an_answer_that_are_no_text_are_no_program() -> None:
    """A part that was no object was a 500."""
    parts: list[Any] = ["x", None, {"type": "output_text", "text": 1}, {"text": RIGHT}]
    odd: list[Any] = ["x", None, {"type": "message"}, {"type": "message", "content": RIGHT}]
    request = body("")
    request["response"]["output"] = [*odd, {"type": "message", "content": parts}]
    async with serving(Told()) as client:
        assert (await client.post("/verify", json=request)).json()["verdict"] == "no_code"


def thinking(text: str, thought: str) -> dict[str, Any]:
    request = body(text)
    request["response"]["output"][0]["summary"] = [{"type": "summary_text", "text": thought}]
    return request


OURS: dict[str, Exception] = {
    "the queue is full": QueueFull(1),
    "the memory is full": MemoryBudgetExceeded(),
    "the store of tests is down": BlobsUnavailable("down"),
}


@pytest.mark.parametrize("name", [*OURS, "the sandbox was lost"])
async def test_every_failure_of_ours_is_a_503_and_never_a_reward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nouscoder.verifier.api.compat.nemo_gym.PATIENCE_S", 0.0)
    told, text = Told(), RIGHT if name in OURS else "```\nlost\n```"
    if name in OURS:
        told.errors["right"] = OURS[name]
    async with serving(told) as client:
        answer = await client.post("/verify", json=body(text))
        assert answer.status_code == 503, answer.text
        assert "reward" not in answer.json()
        assert int(answer.headers["retry-after"]) >= 1
        masked = await client.post("/verify", json=body(text, on_failure="mask"))
    record = masked.json()
    assert (masked.status_code, record["reward"], record["verdict"]) == (200, 0.0, None)
    assert record["mask_sample"] is record["instance_config"]["mask_sample"] is True
    assert record["failure_kind"] == record["_ng_failure_class"] == "infrastructure"
    assert record["failure_reason"]


async def test_rows_that_hold_more_memory_than_there_is_wait_for_each_other() -> None:
    """38 of 40 got a 503 at once, and a trainer that cannot repeat a prompt lost them."""
    told, answers = Told(), []
    told.work_s = 0.001
    row = body(RIGHT)
    row["response"]["token_ids"] = [12345] * 2000
    async with serving(told, budget_bytes=150_000) as client:
        answers = await asyncio.gather(*(client.post("/verify", json=row) for _ in range(40)))
    assert Counter(answer.status_code for answer in answers) == {200: 40}
    assert {answer.json()["reward"] for answer in answers} == {1.0}


async def test_a_service_that_drains_takes_no_row_so_that_another_replica_grades_it() -> None:
    drain = DrainState()
    async with serving(Told(), drain) as client:
        drain.start()
        for path in ("/seed_session", "/verify"):
            assert (await client.post(path, json=body(RIGHT, on_failure="mask"))).status_code == 503


async def test_a_row_that_asks_for_masks_has_them_in_every_answer() -> None:
    async with serving(Told()) as client:
        for text in (RIGHT, WRONG):
            record = await record_of(client, text, on_failure="mask", difficulty="hard")
            assert record["mask_sample"] is record["instance_config"]["mask_sample"] is False
            assert "_ng_failure_class" not in record, "its presence alone marks a failure"
            assert record["difficulty"] == "hard"
        assert "mask_sample" not in await record_of(client, RIGHT)


DIGEST = {"digest": "sha256:" + "0" * 64}
FAULTS: list[tuple[object, str]] = [
    ([], "body"),
    ({"response": None}, "response"),
    ({"response": {"output": None}}, "response.output"),
    ({"verifier_metadata": None}, "verifier_metadata"),
    ({"verifier_metadata": {}}, "verifier_metadata.unit_tests"),
    ({"verifier_metadata": {"unit_tests": PAIRS, "on_failure": "zero"}}, "verifier_metadata.on_failure"),
    *(
        ({"verifier_metadata": {"unit_tests": PAIRS, name: "mask"}}, f"verifier_metadata.{name}")
        for name in ("on_failur", "time_limit", "fn_nmae", "checker_code")
    ),
    ({"verifier_metadata": {"unit_tests": {**PAIRS, "outputs": []}}}, "verifier_metadata.unit_tests.inputs"),
    ({"verifier_metadata": {"unit_tests": {"inputs": [], "outputs": []}}}, "verifier_metadata.unit_tests.cases"),
]


@pytest.mark.parametrize(("changed", "field"), FAULTS)
async def test_a_fault_of_a_row_is_named_by_its_field_and_has_no_reward(changed: Any, field: str) -> None:
    async with serving(Told()) as client:
        answer = await client.post("/verify", json=body(RIGHT) | changed if changed else changed)
        assert (answer.status_code, answer.json()["field"]) == (422, field)
        assert answer.json()["detail"].startswith(f"{field}: ")
        seeded = await client.post("/seed_session", json=body(RIGHT) | changed if changed else changed)
        late = ("response", "verifier_metadata", "verifier_metadata.unit_tests", "verifier_metadata.on_failure")
        known_before = field != "response.output" and field not in late
        assert seeded.status_code == (422 if known_before else 200), "faulty tests are refused before a model answers"


async def test_stored_tests_are_named_by_their_digest() -> None:
    told = Told()
    async with serving(told) as client:
        assert (await client.post("/seed_session", json=body("", DIGEST))).status_code == 200
        assert (await record_of(client, RIGHT, DIGEST))["reward"] == 1.0
        told.errors["right"] = QueueFull(1)
    assert told.seen[0].tests == TestsReference(DIGEST["digest"])


async def test_statistics_are_those_of_the_rewards_by_task() -> None:
    sent = [
        {"_ng_task_index": 1, "reward": 1.0},
        {"_ng_task_index": 0, "reward": 0},
        {"_ng_task_index": 0, "reward": 1},
    ]
    async with serving(Told()) as client:
        found = (await client.post("/aggregate_metrics", json={"verify_responses": sent})).json()
        none = (await client.post("/aggregate_metrics", json={"verify_responses": []})).json()
        assert none == {"group_level_metrics": [], "agent_metrics": {}, "key_metrics": {}}
        for wrong in ({}, {"verify_responses": [{"reward": "x"}]}, {"verify_responses": [1]}):
            assert (await client.post("/aggregate_metrics", json=wrong)).status_code == 422
        for row in (
            '{"reward": 1e400}',
            f'{{"reward": {"9" * 400}}}',
            '{"reward": NaN}',
            '{"reward": Infinity}',
            '{"reward": 1e200}',
            '{"reward": 1, "_ng_task_index": 1e400}',
        ):
            answer = await client.post(
                "/aggregate_metrics", content=f'{{"verify_responses": [{row}, {{"reward": 1}}]}}'
            )
            assert answer.status_code == 422, row
    assert [group["mean/reward"] for group in found["group_level_metrics"]] == [0.5, 1.0]
    assert [group["_ng_task_index"] for group in found["group_level_metrics"]] == [0, 1]
    assert found["key_metrics"]["mean/reward"] == pytest.approx(2 / 3)


async def test_a_key_is_the_password_of_the_host() -> None:
    """NeMo Gym's clients can be given only a host: `any:TOKEN@grader.svc` becomes Basic authentication."""
    keys = f"trainer:{hashlib.sha256(b's3cret').hexdigest()}"
    header = {"Authorization": "Basic " + base64.b64encode(b"any:s3cret").decode()}
    async with serving(Told(), keys=keys) as client:
        for path in ("/seed_session", "/verify", "/aggregate_metrics"):
            assert (await client.post(path, json=body(RIGHT))).status_code == 401
        assert (await client.post("/verify", json=body(RIGHT), headers=header)).json()["reward"] == 1.0


@pytest.mark.parametrize("sent", [b'{"reward":1}', b'{"reward":1,"_ng_task_index":1e3}', b"[" * 51 + b"]" * 51])
async def test_an_evaluation_of_any_size_is_counted_within_bounds_or_refused(sent: bytes) -> None:
    """One body of 53 MiB stalled everybody for 16.7 s and took 1.2 GB."""
    text = b'{"verify_responses":[' + b",".join([sent] * (MAX_ROLLOUTS + 1)) + b"]}"
    with pytest.raises(NotTests, match=r"at most 100,000: send|more than 5,000,000 texts"):
        aggregated(text)
    few = b'{"verify_responses":[' + b",".join([b'{"reward":0.25,"x":[1]}', b'{"reward":1}']) + b"]}"
    assert json.loads(aggregated(few))["key_metrics"] == {
        "mean/reward": 0.625,
        "max/reward": 1.0,
        "min/reward": 0.25,
        "std/reward": pytest.approx(statistics.stdev([0.25, 1])),
    }


def test_a_long_body_is_counted_by_a_process_so_that_no_thread_waits_for_the_interpreter() -> None:
    """Read by a thread of the service, it delayed /healthz by 2.1 s in the median."""
    sent = [b'{"reward":%d,"_ng_task_index":%d}' % (number % 2, number) for number in range(20_000)]
    text = b'{"verify_responses":[' + b",".join(sent) + b"]}"
    before = [resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    answer = gym_metrics.of_any_size(text)
    ours_s, theirs_s = (
        resource.getrusage(who).ru_utime - used_s
        for who, used_s in zip((resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN), before, strict=True)
    )
    assert ours_s < theirs_s / 4
    assert answer == aggregated(text)
    for wrong in (text[:-1], text.replace(b'"reward":1', b'"reward":"x"', 1)):
        with pytest.raises(NotTests) as ours:
            aggregated(wrong)
        with pytest.raises(NotTests) as theirs:
            gym_metrics.of_any_size(wrong)
        assert (str(theirs.value), theirs.value.field) == (str(ours.value), ours.value.field)


def test_a_long_body_that_cannot_be_read_within_its_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym_metrics, "_MEMORY_BYTES", 0)
    with pytest.raises(NotTests, match="within the limits of memory and time: send parts"):
        gym_metrics.of_any_size(b'{"verify_responses":[]}' + b" " * SMALL_BYTES)


async def test_bytes_that_are_declared_and_do_not_arrive_hold_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve connections of 130 bytes held all rows for 59 s."""
    monkeypatch.setattr(nemo_gym, "_COMING_S", 0.01)
    told, drain, budget = Told(), DrainState(), MemoryBudget(200_000)
    app = make_app(told, CollectorRegistry(), drain, 20_000, budget=budget)
    add_nemo_gym(app, told, drain.enter, 20_000, 200_000)
    row = json.dumps(body(RIGHT)).encode()
    async with AsyncExitStack() as stack:
        address = await start_http(app, "127.0.0.1:0", stack)
        host, _, port = address.rpartition(":")
        head = b"POST /verify HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20000\r\n\r\n{"
        for _ in range(12):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(head)
            stack.callback(writer.close)
        await asyncio.sleep(0)
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=5) as client:
            large = b" " * 15_000 + row
            answers = await asyncio.gather(*(client.post("/verify", content=one) for one in (row, row, large)))
    assert [answer.json()["reward"] for answer in answers] == [1.0, 1.0, 1.0]


async def test_one_client_with_a_token_holds_half_of_the_memory_at_most() -> None:
    budget = MemoryBudget(1000)
    with budget.of_client("a").request() as greedy, budget.of_client("b").request() as honest:
        greedy.add(500)
        with pytest.raises(MemoryBudgetExceeded):
            greedy.add(1)
        honest.add(500)
    assert budget.held_bytes == 0
    keys = "a:" + hashlib.sha256(b"a").hexdigest()
    async with serving(Told(), keys=keys, budget_bytes=60_000) as client:
        sent: dict[str, Any] = {"headers": {"Authorization": "Bearer a"}, "content": b"{" * 19_000}
        assert (await client.post("/v1/grade", **sent)).status_code == 422
    async with serving(Told(), keys=keys, budget_bytes=30_000) as client:
        assert (await client.post("/v1/grade", **sent)).status_code == 429
