"""The API in OpenAI's form, over real HTTP: answers, streams, refusals, places in the engine, clients that hang up."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from nouscoder.config import Config, load_config
from nouscoder.demo.policy import EOS_ID, CharTokenizer
from nouscoder.domain.policy import PolicyManifest, Shard
from nouscoder.domain.rollout import Sampling
from nouscoder.domain.tokens import Completion
from nouscoder.evaluation.evaluate import EvaluationRequest, evaluate
from nouscoder.evaluation.samples import SamplingSettings
from nouscoder.generation.engines.base import Engine, EngineUnusable, SampleRequest
from nouscoder.generation.engines.fake import FakeEngine, Script, default_script
from nouscoder.generation.engines.stepped import SteppedEngine
from nouscoder.generation.metrics import GenerationMetrics
from nouscoder.generation.openai.api import start_openai
from nouscoder.generation.openai.sampling import ApiSampler, WantedCompletion
from nouscoder.generation.openai.schema import ApiFault, ChatRequest, parsed
from nouscoder.generation.weights.policies import Policies
from nouscoder.http_server import delivery
from nouscoder.http_server.api_keys import new_api_key

CHARACTERS = CharTokenizer()
CAPACITY = 200
LIMIT_S = 60.0
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class SteppingEngine(FakeEngine):
    """Makes a step only when the test lets it; at the beginning it may make any number."""

    def __init__(self, script: Script) -> None:
        super().__init__(max_running=4, max_tokens_total=CAPACITY, guest_places=8, script=script)
        self._free = True
        self._allowed = threading.Semaphore(0)

    def hold(self) -> None:
        self._free = False

    def allow(self, num_steps: int) -> None:
        self._allowed.release(num_steps)

    def step(self) -> list[tuple[str, Completion]]:
        if not self._free and not self._allowed.acquire(blocking=False):
            time.sleep(0.001)
            return []
        return super().step()


@dataclass
class Service:
    url: str
    engine: Engine
    steps: SteppingEngine
    policies: Policies
    metrics: GenerationMetrics
    http: httpx.AsyncClient

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"nouscoder_generation_api_{name}", labels) or 0.0

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        """The answer to any request. JSON in ASCII can hold half of a surrogate pair."""
        return await self.http.post(path, content=json.dumps(body), headers=headers)

    async def ask(self, path: str = CHAT, **fields: Any) -> dict[str, Any]:
        """The answer to a request that succeeds."""
        answer = await self.post(path, request_of(path, **fields))
        assert answer.status_code == 200, answer.text
        record: dict[str, Any] = answer.json()
        return record

    async def stream(self, path: str = CHAT, **fields: Any) -> list[dict[str, Any]]:
        """The records of a stream, which must end as it should."""
        answer = await self.post(path, request_of(path, stream=True, **fields))
        assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
        events = answer.text.split("\n\n")
        assert all(event.startswith("data: ") for event in events[:-1])
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    async def idle(self) -> None:
        await until(lambda: self.engine.num_running + self.engine.num_waiting == 0)


def request_of(path: str, **fields: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "say"}]} if path == CHAT else {"prompt": "say"}
    return {"model": "mine", **asked, **fields}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def published(folder: Path, version: int) -> PolicyManifest:
    data = (8).to_bytes(8, "little") + b"weights" + bytes([version])
    path = folder / f"{version}.safetensors"
    path.write_bytes(data)
    shard = Shard(path.name, hashlib.sha256(data).hexdigest(), len(data))
    return PolicyManifest(version, version, str(folder), (shard,))


def saying(text: str) -> Script:
    """Every completion is this text."""
    return lambda request: CHARACTERS.encode(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of characters, without a chat template."""
    made = tmp_path_factory.mktemp("policy")
    CHARACTERS.save(made)
    return made


@asynccontextmanager
async def serving(
    folder: Path, weights: Path | None, *overrides: str, script: Script = default_script
) -> AsyncIterator[Service]:
    """The API with the policy of `folder`, version 0 if there is a folder for `weights`."""
    config: Config = load_config(
        None,
        [
            *("run.name=mine", "generation.openai.http=127.0.0.1:0", f"generation.max_tokens_total={CAPACITY}"),
            *overrides,
        ],
    )
    async with AsyncExitStack() as stack:
        steps = SteppingEngine(script)
        metrics = GenerationMetrics()
        engine = await stack.enter_async_context(SteppedEngine(steps, metrics))
        policies = Policies(engine)
        if weights is not None:
            await policies.update(published(weights, 0))
        url = f"http://{await start_openai(config, folder, engine, policies, metrics.api, stack)}"
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=LIMIT_S))
        yield Service(url, engine, steps, policies, metrics, http)


async def test_a_chat_completion_has_the_fields_of_openais_api(folder: Path, tmp_path: Path) -> None:
    async with serving(folder, tmp_path, script=saying("hello")) as service:
        answer = await service.ask()
        assert answer.pop("id").startswith("chatcmpl-")
        assert answer.pop("created") > 1_600_000_000
        assert answer == {
            "object": "chat.completion",
            "model": "mine",
            "system_fingerprint": "mine@0",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "hello", "refusal": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            # bos and three characters; five characters and the stop token
            "usage": {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10},
        }
        cut = await service.ask(max_completion_tokens=2)
        assert cut["choices"][0]["message"]["content"] == "he"
        assert (cut["choices"][0]["finish_reason"], cut["usage"]["completion_tokens"]) == ("length", 2)
        text = await service.ask(TEXT, max_tokens=100)
        assert text["object"] == "text_completion"
        assert text["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_stream_is_the_whole_answer_in_pieces(folder: Path, tmp_path: Path, path: str) -> None:
    asked = {"n": 3, "seed": 7, "max_tokens": 40}
    async with serving(folder, tmp_path) as service:
        whole = await service.ask(path, **asked)
        parts = await service.stream(path, **asked, stream_options={"include_usage": True})
        again = await service.ask(path, **{**asked, "seed": 8})
    assert {part["system_fingerprint"] for part in parts} == {"mine@0"}
    assert len({part["id"] for part in parts}) == 1
    last = parts.pop()
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    texts = ["", "", ""]
    ends: list[str | None] = [None, None, None]
    for part in parts:
        (choice,) = part["choices"]
        texts[choice["index"]] += choice["delta"]["content"] if path == CHAT else choice["text"]
        ends[choice["index"]] = choice["finish_reason"]
    assert texts == [texts_of(choice) for choice in whole["choices"]]
    assert ends == [choice["finish_reason"] for choice in whole["choices"]]
    assert len(set(texts)) == 3, "each choice has a seed of its own"
    assert texts != [texts_of(choice) for choice in again["choices"]]
    if path == CHAT:
        firsts = {choice["index"]: choice["delta"] for part in reversed(parts) for choice in part["choices"]}
        assert all(delta["role"] == "assistant" for delta in firsts.values())


def texts_of(choice: dict[str, Any]) -> str:
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


async def test_pieces_come_while_the_completion_is_sampled(folder: Path, tmp_path: Path) -> None:
    async with serving(folder, tmp_path, script=saying("one two")) as service:
        service.steps.hold()
        service.steps.allow(3)
        body = request_of(CHAT, stream=True)
        async with service.http.stream("POST", CHAT, json=body) as answer, asyncio.timeout(LIMIT_S):
            lines = answer.aiter_lines()
            text = ""
            while text != "one":
                line = await anext(lines)
                if line.startswith("data: "):
                    text += json.loads(line[6:])["choices"][0]["delta"]["content"]
            assert service.engine.num_tokens == 3
            service.steps.allow(100)
            assert [line async for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_stop_string_ends_the_completion_and_its_request(folder: Path, tmp_path: Path, is_stream: bool) -> None:
    async with serving(folder, tmp_path, script=saying("first. second. third.")) as service:
        asked: dict[str, Any] = {"stop": [" third", ". second"], "logprobs": True}
        if is_stream:
            choices = [part["choices"][0] for part in await service.stream(**asked)]
            text = "".join(choice["delta"]["content"] for choice in choices)
        else:
            choices = (await service.ask(**asked))["choices"]
            text = choices[0]["message"]["content"]
        assert (text, choices[-1]["finish_reason"]) == ("first", "stop")
        entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
        assert "".join(entry["token"] for entry in entries) == "first. second"
        await service.idle()


async def test_log_probabilities_are_those_of_the_sampled_tokens(folder: Path, tmp_path: Path) -> None:
    async with serving(folder, tmp_path, script=saying("abc")) as service:
        chat = (await service.ask(logprobs=True))["choices"][0]["logprobs"]["content"]
        entry = {"logprob": -0.5, "top_logprobs": []}
        assert chat == [{"token": letter, "bytes": [ord(letter)], **entry} for letter in "abc"]
        text = (await service.ask(TEXT, logprobs=0))["choices"][0]["logprobs"]
        assert text == {
            "tokens": ["a", "b", "c"],
            "token_logprobs": [-0.5] * 3,
            "top_logprobs": None,
            "text_offset": [0, 1, 2],
        }
        parts = await service.stream(TEXT, logprobs=0)
        offsets = [at for part in parts for at in part["choices"][0]["logprobs"]["text_offset"]]
        assert offsets == [0, 1, 2]


async def test_prompts_are_texts_or_tokens_and_messages_need_the_chat_template(folder: Path, tmp_path: Path) -> None:
    asked: list[SampleRequest] = []

    def script(request: SampleRequest) -> Sequence[int]:
        asked.append(request)
        return CHARACTERS.encode("x")

    async with serving(folder, tmp_path, script=script) as service:
        answer = await service.ask(TEXT, prompt=["ab", "c"], n=2)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        prompts = sorted(list(request.prompt_token_ids) for request in asked)
        assert prompts == sorted(2 * [CHARACTERS.encode_prompt(text) for text in ("ab", "c")])
        assert len({request.sampling.seed for request in asked}) == 4
        await service.ask(TEXT, prompt=[5, 6, 7], temperature=0, top_p=0.5, max_tokens=3)
        assert asked[-1].prompt_token_ids == (5, 6, 7)
        sampling = asked[-1].sampling
        assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0, 0.5, 3)
        assert sampling.seed > 0
        await service.ask(TEXT, prompt="ab<eos>c")
        wanted = [*CHARACTERS.encode_prompt("ab"), EOS_ID, *CHARACTERS.encode("c")]
        assert list(asked[-1].prompt_token_ids) == wanted, "a special token that the prompt names"
        await service.ask()
        assert asked[-1].prompt_token_ids == tuple(CHARACTERS.encode_prompt("say"))
        assert asked[-1].sampling.max_new_tokens == CAPACITY - 4
        two = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
        assert "no chat template" in (await refusal(service, 400, messages=two))["message"]


async def test_messages_are_written_in_the_chat_template(tmp_path: Path) -> None:
    CHARACTERS.save(tmp_path)
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[{{ enable_thinking }}]"
    (tmp_path / "chat_template.jinja").write_text(template)
    asked: list[SampleRequest] = []

    def script(request: SampleRequest) -> Sequence[int]:
        asked.append(request)
        return []

    async with serving(tmp_path, tmp_path, script=script) as service:
        messages = [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "what"}, {"type": "text", "text": " now"}]},
            {"role": "assistant", "content": "<eos>"},
            {"role": "user", "content": "?"},
        ]
        await service.ask(messages=messages, chat_template_kwargs={"enable_thinking": False})
    wanted = "[system]be brief[user]what now[assistant]<eos>[user]?[False]"
    assert list(asked[0].prompt_token_ids) == CHARACTERS.encode(wanted), "the name of a special token is a text"


async def test_a_prompt_that_opens_the_reasoning_is_told_with_the_answer(tmp_path: Path) -> None:
    CHARACTERS.save(tmp_path)
    template = "{{ messages[0].content }}{% if enable_thinking is not defined %}<think>{{ '\\n' }}{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    async with serving(tmp_path, tmp_path, script=lambda request: []) as service:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}]}
        opened = await service.ask(**asked)
        closed = await service.ask(**asked, chat_template_kwargs={"enable_thinking": False})
    messages = [answer["choices"][0]["message"] for answer in (opened, closed)]
    assert [message.get("prefill") for message in messages] == ["<think>\n", None]


async def refusal(service: Service, status: int, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    """The error of a request that is refused."""
    answer = await service.post(path, request_of(path, **fields))
    assert answer.status_code == status, answer.text
    (record,) = answer.json().values()
    assert sorted(record) == ["code", "message", "param", "type"]
    assert isinstance(record["message"], str)
    return dict(record)


REFUSED: list[tuple[str, dict[str, Any], str | None, str]] = [
    (CHAT, {"temperature": 2.5}, "temperature", "less than or equal to 2"),
    (CHAT, {"temperature": True}, "temperature", "valid number"),
    (CHAT, {"temperature": 1e-38}, "temperature", "must be 0, or at least 0.01"),
    (CHAT, {"\ud800": 1}, None, "the body is not JSON: unexpected end of hex escape"),
    (CHAT, {"top_p": 0}, "top_p", "greater than 0"),
    (CHAT, {"n": 129}, "n", "less than or equal to 128"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    (CHAT, {"top_k": 20}, "top_k", "Extra inputs"),
    (CHAT, {"presence_penalty": 0.5}, None, "presence_penalty is not supported, except with the value 0"),
    (CHAT, {"tools": [{"type": "function"}]}, None, "tools is not supported"),
    (CHAT, {"top_logprobs": 3, "logprobs": True}, None, "top_logprobs is not supported"),
    (CHAT, {"stop": ["a"] * 5}, None, "at most 4 texts"),
    (CHAT, {"stop": ""}, None, "none of them empty"),
    (CHAT, {"messages": []}, "messages", "at least 1 item"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, None, "unexpected end of hex escape"),
    (CHAT, {"messages": [{"role": "function", "content": "x"}]}, "messages.0.role", "'user'"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * CAPACITY}]}, "messages", f"may have {CAPACITY}"),
    (TEXT, {"prompt": []}, "prompt", "there is none"),
    (TEXT, {"prompt": [[]]}, "prompt", "there is no token"),
    (TEXT, {"prompt": [10**6]}, "prompt", "not in the vocabulary"),
    (TEXT, {"prompt": [-1]}, "prompt", "not in the vocabulary"),
    (TEXT, {"prompt": 3}, "prompt", "must be a text"),
    (TEXT, {"prompt": [-1] * (CAPACITY + 1)}, "prompt", f"may have {CAPACITY}"),
    (TEXT, {"prompt": ["x"] * 129}, None, "prompt: at most 128"),
    (TEXT, {"prompt": [5, *[[5]] * 128]}, None, "prompt: at most 128"),
    (TEXT, {"prompt": ["a"] * 3, "n": 100}, "n", "at most 128"),
    (TEXT, {"logprobs": 5}, "logprobs", "less than or equal to 0"),
    (TEXT, {"echo": True}, None, "echo is not supported"),
]


async def test_a_request_that_cannot_be_honoured_is_refused_by_field(refusing: Service) -> None:
    for path, fields, param, says in REFUSED:
        error = await refusal(refusing, 400, path, **fields)
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert says in error["message"]


@pytest.fixture
async def refusing(folder: Path, tmp_path: Path) -> AsyncIterator[Service]:
    async with serving(folder, tmp_path, "generation.openai.max_body_bytes=2000") as service:
        yield service


async def test_bodies_paths_and_models_that_are_not_there_are_refused(refusing: Service) -> None:
    http = refusing.http
    for body, status in ((b"{", 400), (b"[1]", 400), (b"\xff", 400), (b"[" * 1500, 400), (b" " * 3000, 413)):
        answer = await http.post(CHAT, content=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")
    assert (await http.get(CHAT)).status_code == 405
    assert (await http.get("/v1/nothing")).json()["error"]["message"] == "Not Found"
    for other in ("yours", "mine@1"):
        error = await refusal(refusing, 404, model=other)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "there are mine and mine@0" in error["message"]
    assert (await refusing.ask(model="mine@0", user="me", presence_penalty=0, tools=[]))["model"] == "mine"
    models = (await http.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["mine", "mine@0"]


async def test_without_a_policy_there_is_no_completion(folder: Path, tmp_path: Path) -> None:
    async with serving(folder, None) as service:
        error = await refusal(service, 503)
        assert (error["type"], error["code"]) == ("server_error", "policy_missing")
        assert (await service.http.get("/healthz")).json() == {"status": "ok"}
        assert (await service.http.get("/readyz")).status_code == 503
        await service.policies.update(published(tmp_path, 5))
        assert (await service.ask())["system_fingerprint"] == "mine@5"
        assert (await service.http.get("/readyz")).json() == {"status": "ready with policy version 5"}


async def test_with_tokens_only_their_holders_are_served(folder: Path, tmp_path: Path) -> None:
    secret, line = new_api_key("ann")
    tokens = tmp_path / "tokens"
    tokens.write_text(line)
    async with serving(folder, tmp_path, f"generation.openai.tokens_file={tokens}") as service:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {secret}"}):
            answer = await service.http.post(CHAT, json=request_of(CHAT), headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert (await service.http.get("/v1/models", headers=headers)).status_code == 401
        known = {"authorization": f"Bearer {secret}"}
        assert (await service.http.post(CHAT, json=request_of(CHAT), headers=known)).status_code == 200
        assert (await service.http.get("/healthz")).status_code == 200


async def test_without_tokens_no_foreign_site_is_served(refusing: Service) -> None:
    for headers in ({"origin": "https://evil.example"}, {"host": "evil.example"}):
        answer = await refusing.http.post(CHAT, json=request_of(CHAT), headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_site")


async def test_places_and_requests_are_bounded_and_rollouts_keep_theirs(folder: Path, tmp_path: Path) -> None:
    bounds = ("generation.openai.slots=2", "generation.openai.max_requests=6")
    async with serving(folder, tmp_path, *bounds) as service:
        await service.engine.pause(LIMIT_S)
        ids = (f"r{number}" for number in range(6))
        rollouts = [service.engine.sample(SampleRequest(name, (5, 6), Sampling(), frozenset({2}))) for name in ids]
        asked = {asyncio.create_task(service.post(CHAT, request_of(CHAT, n=2))) for _ in range(4)}
        refused, asked = await asyncio.wait(asked, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        (answer,) = (task.result() for task in refused)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert "3 of 6 requests are in progress, 3 of them yours" in answer.json()["error"]["message"]
        other = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
        async with httpx.AsyncClient(base_url=service.url, transport=other, timeout=LIMIT_S) as client:
            asked.add(asyncio.create_task(client.post(CHAT, json=request_of(CHAT, n=2))))
            await until(lambda: service.metric("tokens_total", kind="prompt") == 4 * 5)
            await until(lambda: service.engine.num_waiting == 6 + 2)
            await service.engine.resume()
            answers = [await task for task in asked]
        assert [len(answer.json()["choices"]) for answer in answers] == [2] * 4
        await asyncio.wait_for(asyncio.gather(*rollouts), LIMIT_S)
        assert (await service.ask())["choices"], "the requests before are no longer counted"


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stop": "never", "n": 2}])
async def test_a_client_that_hangs_up_leaves_no_request_in_the_engine(
    folder: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    async with serving(folder, tmp_path) as service:
        await service.engine.pause(LIMIT_S)
        asking = asyncio.create_task(service.http.post(CHAT, json=request_of(CHAT, **fields)))
        await until(lambda: service.engine.num_waiting == fields.get("n", 1))
        asking.cancel()
        await service.idle()
        await service.engine.resume()
        answer = await service.ask()
        assert service.engine.num_tokens == answer["usage"]["completion_tokens"], "nothing was sampled for the client"


async def test_a_client_that_hangs_up_in_the_middle_of_a_stream_frees_its_place(folder: Path, tmp_path: Path) -> None:
    async with serving(folder, tmp_path, script=saying("a long text")) as service:
        service.steps.hold()
        service.steps.allow(2)
        async with service.http.stream("POST", CHAT, json=request_of(CHAT, stream=True)) as answer:
            assert (await anext(answer.aiter_lines())).startswith("data: ")
        await until(lambda: service.engine.num_running == 0)


def test_too_many_messages_are_refused_before_they_are_checked() -> None:
    messages = [{"role": "user", "content": ""}] * 4097
    with pytest.raises(ApiFault, match="messages: must have at most 4096 items"):
        parsed(ChatRequest, json.dumps({"model": "mine", "messages": messages}).encode())


async def test_a_client_that_stops_reading_frees_its_slot(tmp_path: Path) -> None:
    slow = FakeEngine(max_running=4, max_tokens_total=CAPACITY, guest_places=1, script=saying("x" * 60), step_s=0.01)
    async with SteppedEngine(slow, GenerationMetrics()) as engine:
        await Policies(engine).update(published(tmp_path, 0))
        samples = ApiSampler(engine, CHARACTERS.decode, frozenset({EOS_ID}), slots=1)
        wanted = WantedCompletion(tuple(CHARACTERS.encode_prompt("say")), Sampling(max_new_tokens=100))
        pieces = samples.pieces([wanted], "a", LIMIT_S)
        _, first = await anext(pieces)
        (other,) = await asyncio.wait_for(samples.whole([wanted], "b"), LIMIT_S)
        rest = [piece async for _, piece in pieces]
    assert other.text == "x" * 60
    assert "".join(piece.text for piece in [first, *rest]) == "x" * 60, "nothing is lost for the slow one"
    assert len(rest) > 1


async def test_a_client_that_takes_nothing_is_given_up(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "ANSWER_PATIENCE_S", 0.5)
    name = "m" * (8 << 20)  # a long name makes a long answer
    async with serving(
        folder, tmp_path, "generation.openai.max_requests=1", f"generation.openai.model={name}"
    ) as service:
        host, _, port = service.url.removeprefix("http://").rpartition(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(LIMIT_S)
            client.connect((host, int(port)))
            client.sendall(f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            await until(lambda: service.metric("request_seconds_count", route="/v1/models") == 1)
            received = 0
            while part := await asyncio.to_thread(client.recv, 1 << 20):
                received += len(part)
            assert received < 2 * len(name), "the rest never came"
        monkeypatch.setattr(delivery, "ANSWER_PATIENCE_S", LIMIT_S)
        answer = await service.http.get("/v1/models")
        assert len(answer.content) > 2 * len(name), "the request before is no longer counted"


async def test_requests_and_tokens_are_counted(folder: Path, tmp_path: Path) -> None:
    async with serving(folder, tmp_path, script=saying("hello")) as service:
        for _ in range(2):
            await service.ask()
        await service.stream()
        await refusal(service, 400, n=0)
        await service.ask(TEXT, prompt=["a", "bc"])
        await service.http.get("/v1/nothing")
        await service.http.get("/healthz")
        counted = {
            (labels["route"], labels["status"]): value
            for family in service.metrics.registry.collect()
            for name, labels, value, *_ in family.samples
            if name == "nouscoder_generation_api_requests_total" and value
        }
        # bos and the characters of each prompt; five characters and the stop token of each completion
        assert service.metric("tokens_total", kind="prompt") == 3 * 4 + 2 + 3
        assert service.metric("tokens_total", kind="completion") == 5 * 6
        assert service.metric("request_seconds_count", route=CHAT) == 4
    assert counted == {(CHAT, "200"): 3, (CHAT, "400"): 1, (TEXT, "200"): 1, ("other", "404"): 1}


async def test_a_policy_that_comes_meanwhile_is_named(folder: Path, tmp_path: Path) -> None:
    async with serving(folder, tmp_path, script=saying("some text")) as service:
        service.steps.hold()
        asking = asyncio.create_task(service.ask())
        await until(lambda: service.engine.num_waiting + service.engine.num_running == 1)
        service.steps.allow(2)
        await until(lambda: service.engine.num_tokens == 2)
        await service.policies.update(published(tmp_path, 1))
        service.steps.allow(100)
        answer = await asking
    assert answer["system_fingerprint"] == "mine@0-1"
    assert answer["choices"][0]["message"]["content"] == "some text"


async def test_a_request_that_takes_too_long_is_given_up(folder: Path, tmp_path: Path) -> None:
    async with serving(folder, tmp_path, "generation.openai.request_limit_s=0.2") as service:
        await service.engine.pause(LIMIT_S)
        for is_stream in (False, True):
            error = await refusal(service, 503, stream=is_stream)
            assert (error["code"], error["message"]) == ("timeout", "the completion took longer than 0.2 s")
        await until(lambda: service.engine.num_waiting == 0)


async def test_a_policy_without_a_tokenizer_is_told_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(EngineUnusable, match=r"generation\.openai: .* tokenizer"):
        async with serving(tmp_path, tmp_path):
            pass


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """Two problems, each of which wants its name printed. A completion is the program."""
    file = tmp_path / "problems.jsonl"
    lines = [
        {
            "problem_id": name,
            "prompt": f"Print {name}",
            "tests": {"type": "stdin", "cases": [{"input": "", "output": f"{name}\n"}]},
            "limits": {"wall_time_s": 120, "cpu_time_s": 60},
            "text_is_code": True,
        }
        for name in ("p0", "p1")
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


async def test_nouscoder_eval_measures_the_policy_in_use(folder: Path, tmp_path: Path, problems: Path) -> None:
    """The policy solves p0 always and p1 never; `nouscoder eval` asks by its own client and grades in sandboxes."""

    def script(request: SampleRequest) -> Sequence[int]:
        name = CHARACTERS.decode(request.prompt_token_ids)[-2:]
        return CHARACTERS.encode("print('p0')" if name == "p0" else "print(1)")

    async with serving(folder, tmp_path, script=script) as service:
        request = EvaluationRequest(problems, tmp_path / "out", SamplingSettings("mine", 2), f"{service.url}/v1")
        record = await asyncio.to_thread(evaluate, request, load_config(None, []))
    assert record["profiles"]["process"]["verdicts"] == {"accepted": 2, "wrong_answer": 2}
    assert record["profiles"]["process"]["pass_at_k"]["1"]["value"] == 0.5
