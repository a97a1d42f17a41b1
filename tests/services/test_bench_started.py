"""Services that a bench starts: their address comes from their log, and what goes wrong is a sentence."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from nouscoder.bench.measuring import BenchError, started

SERVICE = """
import json, sys, time
for record in ({"event": "loading"}, "a line of a library", 7, {"event": "listening", "grpc": "127.0.0.1:9"}):
    print(record if isinstance(record, str) else json.dumps(record), file=sys.stderr, flush=True)
time.sleep(600)
"""


def service(program: str, told: list[Any], limit_s: float = 60.0) -> AbstractAsyncContextManager[tuple[int, str]]:
    command: Sequence[str] = [sys.executable, "-c", program]
    return started(command, "grpc", limit_s, "it ended:\n{log}", "it was late", told.append)


async def test_a_service_is_ready_when_its_log_says_where_it_listens_and_every_record_is_told() -> None:
    told: list[Any] = []
    async with service(SERVICE, told) as (pid, address):
        assert pid > 0
        assert address == "127.0.0.1:9"
    assert told == [{"event": "loading"}, {"event": "listening", "grpc": "127.0.0.1:9"}]


async def test_a_service_that_ends_or_is_late_is_told_in_a_sentence() -> None:
    with pytest.raises(BenchError, match="it ended:\nno such thing"):
        async with service("import sys; sys.exit('no such thing')", []):
            pass
    with pytest.raises(BenchError, match="it was late"):
        async with service("import time; time.sleep(600)", [], limit_s=0.1):
            pass
