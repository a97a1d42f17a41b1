"""The port for health checks has a thread of its own: no client delays it, and it says when the service hangs."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import pytest

from nouscoder.http_server.listener import start_apart, start_http
from nouscoder.rpc.addresses import AddressError
from nouscoder.verifier.api import rest
from nouscoder.verifier.api.rest import DrainState, make_health_app

Status = Callable[[str], int]


@pytest.fixture
async def served() -> AsyncIterator[tuple[Status, DrainState]]:
    """The status of a path, asked while the service's own event loop does nothing else."""
    state = DrainState()
    async with AsyncExitStack() as stack:
        address = await start_apart(make_health_app(state), "127.0.0.1:0", stack)
        state.beat()

        def status(path: str) -> int:
            try:
                with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                return error.code

        asker = stack.enter_context(ThreadPoolExecutor(1))
        yield lambda path: asker.submit(status, path).result(10), state


async def test_the_port_answers_while_the_event_loop_of_the_clients_is_busy(served: tuple[Status, DrainState]) -> None:
    status, state = served
    assert (status("/healthz"), status("/readyz")) == (200, 200)
    state.start()
    assert (status("/healthz"), status("/readyz")) == (200, 503)


async def test_a_service_whose_event_loop_hangs_is_not_alive(
    served: tuple[Status, DrainState], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _ = served
    monkeypatch.setattr(rest, "SILENCE_S", 0.0)
    assert status("/healthz") == 503


async def test_an_address_in_use_is_said(served: tuple[Status, DrainState]) -> None:
    async with AsyncExitStack() as stack:
        taken = await start_apart(make_health_app(DrainState()), "127.0.0.1:0", stack)
        with pytest.raises(AddressError, match="cannot listen"):
            await start_apart(make_health_app(DrainState()), taken, stack)
    await asyncio.sleep(0)


@pytest.mark.parametrize(("sent", "answered"), [(20, 20), (2000, 0)])
async def test_requests_that_are_sent_before_an_answer_are_bounded(sent: int, answered: int) -> None:
    """Parsing 64 KiB of them took a turn of 75 ms, again and again."""
    async with AsyncExitStack() as stack:
        host, _, port = (await start_http(make_health_app(DrainState()), "127.0.0.1:0", stack)).rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        one = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
        writer.write(one * (sent - 1) + one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        found = await asyncio.wait_for(reader.read(), 10) if sent < 100 else await reader.readuntil(b"\r\n\r\n")
        writer.close()
    assert found.count(b"HTTP/1.1 200") == answered
    assert found.count(b"HTTP/1.1 400") == (not answered)
