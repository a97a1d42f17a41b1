"""Clients of the API in OpenAI's form: bounded bodies, connections and prompts, and fair turns."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.services.test_generation_openai import (
    CAPACITY,
    CHARACTERS,
    CHAT,
    Service,
    published,
    request_of,
    saying,
    serving,
    until,
)

from nouscoder.demo.policy import EOS_ID
from nouscoder.domain.rollout import Sampling
from nouscoder.generation.engines.base import Engine
from nouscoder.generation.engines.fake import FakeEngine
from nouscoder.generation.engines.stepped import SteppedEngine
from nouscoder.generation.metrics import GenerationMetrics
from nouscoder.generation.openai import sampling
from nouscoder.generation.openai.completions import CHARACTERS_OF_TOKEN, PromptEncoder
from nouscoder.generation.openai.sampling import ApiSampler, WantedCompletion
from nouscoder.generation.openai.schema import ApiFault, ChatRequest, CompletionRequest, parsed, parsed_body
from nouscoder.generation.weights.policies import Policies
from nouscoder.http_server import listener
from nouscoder.http_server.api_keys import client_of

LIMIT_S = 60.0
WANTED = WantedCompletion(tuple(CHARACTERS.encode_prompt("say")), Sampling(max_new_tokens=100))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("policy")
    CHARACTERS.save(made)
    return made


# Bodies


NUMBERS = "[" + ",".join(["1"] * 2_000_000) + "]"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, '{"model":"mine","messages":[{"role":"user","content":' + NUMBERS + "}]}"),
        (CompletionRequest, '{"model":"mine","prompt":' + NUMBERS + "}"),
        (CompletionRequest, '{"model":"mine","prompt":[' + "[" * 1_000_000),
    ],
)
async def test_a_body_with_very_many_values_is_never_decoded(kind: Any, body: str) -> None:
    """Before, 4 MiB of numbers as content stopped the event loop for 12 s and took 3 GiB."""
    sent = body.encode()
    tracemalloc.start()
    try:
        with pytest.raises(ApiFault, match="holds too many values"):
            await parsed_body(kind, sent)
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()


async def test_of_very_many_wrong_values_only_the_first_is_a_fault() -> None:
    wrong = json.dumps({"model": "mine", "prompt": [None] * 60_000})
    tracemalloc.start()
    try:
        with pytest.raises(ApiFault, match="prompt"):
            parsed(CompletionRequest, wrong.encode())
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20  # 60 MiB for all faults
    finally:
        tracemalloc.stop()


async def test_refused_bodies_keep_no_memory_until_a_collection_of_garbage() -> None:
    body = json.dumps({"model": "mine", "prompt": ["a"] * 240_000}).encode()
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(5):
            with suppress(ApiFault):
                await parsed_body(CompletionRequest, body)
        assert tracemalloc.get_traced_memory()[0] < 4 * 2**20  # 17 MiB of each
    finally:
        tracemalloc.stop()
        gc.enable()


def slow_body(service: Service, num_bytes: int = 0) -> socket.socket:
    """A connection with a request whose body does not come, but for so many bytes."""
    host, _, port = service.url.removeprefix("http://").rpartition(":")
    client = socket.create_connection((host, int(port)))
    client.settimeout(LIMIT_S)
    client.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 20000\r\n\r\n".encode() + b" " * num_bytes)
    return client


@asynccontextmanager
async def another_client(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    """It has another address."""
    transport = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
    async with httpx.AsyncClient(base_url=service.url, transport=transport, timeout=LIMIT_S) as client:
        yield client


async def test_one_client_holds_at_most_half_of_the_memory_for_bodies(folder: Path, tmp_path: Path) -> None:
    large = request_of(CHAT, user="x" * 15_000)
    async with (
        serving(folder, tmp_path, "generation.openai.max_body_bytes=20000") as service,
        another_client(service) as other,
    ):
        slow = [slow_body(service, 19_000) for _ in range(40)]  # the budget is that of 32
        async with asyncio.timeout(LIMIT_S):
            while (await service.post(CHAT, large)).status_code != 429:
                await asyncio.sleep(0.01)
        assert (await other.post(CHAT, json=large)).status_code == 200
        for client in slow:
            client.close()


async def test_connections_that_send_nothing_keep_nobody_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that have sent no whole request are ended, the oldest first."""
    monkeypatch.setattr(listener, "MOST_CONNECTIONS", 4)
    async with serving(folder, tmp_path) as service:
        slow = [slow_body(service) for _ in range(9)]
        assert (await service.ask())["choices"]
        ended = [client for client in slow if await asyncio.to_thread(is_ended, client)]
        assert ended == slow[:6]
        for client in slow:
            client.close()


def is_ended(client: socket.socket) -> bool:
    """Whether the other side has ended the connection. One that is open sends nothing before its limit."""
    client.settimeout(0.5)
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


async def test_bodies_that_do_not_come_take_no_place(folder: Path, tmp_path: Path) -> None:
    """Before, as many of them as max_requests kept everybody out."""
    async with serving(folder, tmp_path, "generation.openai.max_requests=2") as service:
        slow = [slow_body(service) for _ in range(6)]
        for _ in range(3):
            assert (await service.ask())["choices"]
        for client in slow:
            client.close()


# Prompts


class HeldTokenizer:
    """Encodes when it may. `begun` has the texts in order."""

    has_chat_template = False
    vocabulary_size = 10

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.may = threading.Semaphore(0)

    def encode(self, text: str) -> list[int]:
        self.begun.append(text)
        assert self.may.acquire(timeout=LIMIT_S)
        return [1, 2]

    encode_whole = encode


def encoder_of(tokenizer: Any, capacity: int = 10) -> PromptEncoder:
    return PromptEncoder(tokenizer, capacity)


def asking(*prompts: str) -> CompletionRequest:
    return CompletionRequest(model="mine", prompt=list(prompts))


@pytest.mark.parametrize("num_more", [0, 1])
async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(num_more: int) -> None:
    tokenizer = HeldTokenizer()
    tokenizer.may.release(10)
    text = "x" * (CHARACTERS_OF_TOKEN * 10 + num_more)
    chat = ChatRequest.model_validate({"model": "mine", "messages": [{"role": "user", "content": text}]})
    for encoding in (
        encoder_of(tokenizer).of_completion(asking("a", text), "me"),
        encoder_of(tokenizer).of_chat(chat, "me"),
    ):
        if not num_more:
            assert await encoding
            continue
        with pytest.raises(ApiFault, match=f"has {len(text)} characters") as raised:
            await encoding
        assert raised.value.record["error"]["code"] == "context_length_exceeded"
        assert not tokenizer.begun


async def test_clients_take_turns_with_their_prompts() -> None:
    tokenizer = HeldTokenizer()
    encoder = encoder_of(tokenizer)
    greedy = asyncio.create_task(encoder.of_completion(asking(*(f"g{number}" for number in range(20))), "greedy"))
    await until(lambda: bool(tokenizer.begun))
    honest = asyncio.create_task(encoder.of_completion(asking("honest"), "honest"))
    await asyncio.sleep(0)
    tokenizer.may.release(3)
    assert await asyncio.wait_for(honest, LIMIT_S) == [(1, 2)]
    assert tokenizer.begun.index("honest") <= 2
    tokenizer.may.release(100)
    assert len(await asyncio.wait_for(greedy, LIMIT_S)) == 20


async def test_a_tokenizer_is_used_once_at_a_time_also_after_a_client_hung_up() -> None:
    tokenizer = HeldTokenizer()
    encoder = encoder_of(tokenizer)
    gone = asyncio.create_task(encoder.of_completion(asking("gone"), "a"))
    await until(lambda: bool(tokenizer.begun))
    gone.cancel()
    other = asyncio.create_task(encoder.of_completion(asking("other"), "b"))
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert tokenizer.begun == ["gone"]
    tokenizer.may.release(2)
    assert await asyncio.wait_for(other, LIMIT_S) == [(1, 2)]


# Turns and streams


@asynccontextmanager
async def sampler(tmp_path: Path, slots: int = 1, text: str = "abc") -> AsyncIterator[tuple[ApiSampler, Engine]]:
    steps = FakeEngine(max_running=4, max_tokens_total=CAPACITY, guest_places=slots, script=saying(text))
    async with SteppedEngine(steps, GenerationMetrics()) as engine:
        policies = Policies(engine)
        await policies.update(published(tmp_path, 0))
        yield ApiSampler(engine, CHARACTERS.decode, frozenset({EOS_ID}), slots), engine


@pytest.mark.parametrize("other", ["another", "greedy"])
async def test_a_request_for_many_completions_takes_as_many_turns(
    tmp_path: Path, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, all completions of a request stood before those of a later request."""
    async with sampler(tmp_path) as (samples, _):
        ended = 0

        def count(_: object) -> None:
            nonlocal ended
            ended += 1

        monkeypatch.setattr(sampling, "charge_decoded", count)  # called for each that has ended
        greedy = asyncio.create_task(samples.whole([WANTED] * 100, "greedy"))
        await until(lambda: ended > 0)
        before = ended
        assert len(await samples.whole([WANTED], other)) == 1
        assert ended - before <= 3 + 1, "3 of the greedy request, and the other's own"
        assert len(await greedy) == 100


def test_whose_request_it_is() -> None:
    assert client_of(("10.0.0.1", 5)) == client_of(("10.0.0.1", 6)) != client_of(("10.0.0.2", 5))
    assert client_of(("2001:db8::1", 5)) == client_of(("2001:db8::ffff:2", 5)) == "2001:db8::/64"
    assert client_of(("2001:db8:0:1::1", 5)) != client_of(("2001:db8::1", 5))
    assert client_of(("::ffff:10.0.0.1", 5)) == "::ffff:10.0.0.1"
    assert client_of(None) == ""
