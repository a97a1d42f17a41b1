"""Bodies with very many items: /healthz is answered beside them, and each is refused or graded."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Protocol

import httpx
from tests.fuzz.live_seeds import BODIES, CROWDED_BYTES, crowded

HEALTH_S = 5.0  # longer than the event loop may stand still; one such body stopped it for longer
ANSWER_S = 300.0
MANY = CROWDED_BYTES // 2


class Verifier(Protocol):
    """See conftest.py."""

    url: str


def hostile() -> list[tuple[str, bytes]]:
    """Bodies of 4 MiB by path: the worst ones known, and some of each path."""
    ones, lists = b"[" + b"1," * MANY + b"1]", b"[" + b"[]," * (MANY // 2) + b"[]]"
    tests = b'{"type":"stdin","cases":' + ones + b"}"
    found = [
        ("/v1/grade", b'{"code":"1","tests":' + tests + b"}"),
        ("/v1/grade", b'{"limits":null,"tests":{"inputs":%s,"outputs":%s,"fn_name":"f"}}' % (lists, lists)),
        ("/v1/tests", tests),
        ("/v1/grade", b'{"completion":' + json.dumps("```\n" * (MANY // 2)).encode() + b',"tests":' + tests + b"}"),
    ]
    draw = random.Random(1)
    return found + [(path, crowded(some[0], draw)) for path, some in BODIES.items() for _ in range(3)]


async def test_health_is_answered_beside_bodies_with_very_many_items(verifier: Verifier) -> None:
    answers: list[tuple[str, int]] = []
    num_healthy = 0

    async def send_all(http: httpx.AsyncClient) -> None:
        for path, body in hostile():
            answer = await http.request("PUT" if path == "/v1/tests" else "POST", path, content=body)
            answers.append((path, answer.status_code))

    async with httpx.AsyncClient(base_url=verifier.url, timeout=ANSWER_S) as http:
        sending = asyncio.create_task(send_all(http))
        while not sending.done():
            assert (await http.get("/healthz", timeout=HEALTH_S)).status_code == 200
            num_healthy += 1
            await asyncio.wait({sending}, timeout=0.05)
        await sending
    assert num_healthy
    assert {status for _, status in answers} <= {200, 202, 413, 415, 422, 429, 501, 503, 504}, answers
    assert answers[0] == ("/v1/grade", 413)
