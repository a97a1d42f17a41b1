"""While generation starts, one line says so, and no text of gRPC is shown to a person before half a minute."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc
import pytest

from nouscoder.config import Config
from nouscoder.rpc.addresses import unix_address
from nouscoder.rpc.channel import PeerError
from nouscoder.rpc.generation_client import GenerationClient
from nouscoder.run.watch import generation_started


async def test_a_start_of_generation_is_shown_without_the_words_of_grpc(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address, shown, server = unix_address(tmp_path / "g.sock"), asyncio.Queue[str](), grpc.aio.server()
    config = Config().changed(generation={"grpc": address})
    starting = asyncio.create_task(generation_started(config, lambda phase, *_: shown.put_nowait(phase)))
    assert await asyncio.wait_for(shown.get(), 60) == "generation is starting (0 s)"
    server.add_insecure_port(address)
    await server.start()
    with pytest.raises(PeerError):  # it answers, that it has no such method
        await starting
    await server.stop(None)
    assert not caplog.records


async def test_a_silent_service_is_logged_after_half_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    for after_s, logged in ((30.0, 0), (0.0, 1)):
        monkeypatch.setattr("nouscoder.rpc.channel._START_S", after_s)
        async with GenerationClient(unix_address(tmp_path / "g.sock"), 0.2) as client:
            with pytest.raises(PeerError):
                await client.status()
        assert len(caplog.records) == logged
