"""`nouscoder serve verifier` with two gateway processes: one service for its clients.

Also when one is killed or hangs.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from nouscoder.config import load_config
from nouscoder.http_server.api_keys import new_api_key
from nouscoder.verifier.processes.parent import Gateway, Gateways, SilenceLimit
from nouscoder.verifier.processes.share import Order, ProcessNumber, section_of

_LIMIT_S = 120.0


class Service:
    """A running service: its parent, the REST API and the page of metrics."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, metrics: str) -> None:
        self.process = process
        self.url = url
        self.metrics = metrics

    @property
    def gateways(self) -> list[int]:
        """The pids of the gateway processes."""
        return [one.pid for one in psutil.Process(self.process.pid).children(recursive=True) if _is_gateway(one)]


def _is_gateway(process: psutil.Process) -> bool:
    try:
        return "nouscoder.verifier.processes.share" in process.cmdline()
    except psutil.NoSuchProcess:  # a program that was graded has ended meanwhile
        return False


@asynccontextmanager
async def serving(*overrides: str) -> AsyncIterator[Service]:
    """Yields a service that takes calls. It may have ended before the end of the context."""
    command = [sys.executable, "-m", "nouscoder", "serve", "verifier", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    for one in ("verifier.processes=2", "verifier.sandbox.slots=2", "verifier.cache_entries=0", *overrides):
        command += ["--set", one]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    lines: list[bytes] = []
    try:
        async with asyncio.timeout(_LIMIT_S):
            while b'"http"' not in (lines or [b""])[-1]:
                lines.append(await process.stderr.readline())
                assert lines[-1], b"".join(lines).decode()
        drain = asyncio.create_task(process.stderr.read())
        said = json.loads(lines[-1])
        assert b"".join(lines).count(b'"listening"') == 1
        yield Service(process, f"http://{said['http']}", f"http://{said['metrics']}/metrics")
        drain.cancel()
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(_LIMIT_S):
            await process.wait()


def request(code: str, answer: str = "1\n") -> dict[str, object]:
    return {"code": code, "tests": {"type": "stdin", "cases": [{"input": "1\n", "output": answer}]}}


async def metric(service: Service, name: str) -> float:
    """The sum of all series of a metric, as the parent gives it."""
    async with httpx.AsyncClient(timeout=_LIMIT_S) as client:
        text = (await client.get(service.metrics)).text
    return sum(float(found) for found in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


async def until_ended(pids: list[int]) -> None:
    async with asyncio.timeout(_LIMIT_S):
        while any(runs(pid) for pid in pids):
            await asyncio.sleep(0.02)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Sender:
    """A client with one connection that sends until it is told to stop."""

    def __init__(self, url: str) -> None:
        self.num_right = self.num_lost = 0
        self._client = httpx.AsyncClient(base_url=url, timeout=_LIMIT_S, limits=httpx.Limits(max_connections=1))

    async def send(self, stop: asyncio.Event) -> None:
        async with self._client:
            while not stop.is_set():
                try:
                    answer = (await self._client.post("/v1/grade", json=request("print(input())"))).json()
                except httpx.TransportError:
                    self.num_lost += 1
                    continue
                assert answer["verdict"] == "accepted", answer
                self.num_right += 1


@pytest.mark.heavy
async def test_a_killed_process_is_replaced_and_the_clients_of_the_other_lose_nothing() -> None:
    async with serving() as service, httpx.AsyncClient(base_url=service.url, timeout=_LIMIT_S) as client:
        stop, senders = asyncio.Event(), [Sender(service.url) for _ in range(6)]
        assert len(service.gateways) == 2
        async with asyncio.TaskGroup() as group:
            for sender in senders:
                group.create_task(sender.send(stop))
            async with asyncio.timeout(_LIMIT_S):
                while min(sender.num_right for sender in senders) < 5:
                    await asyncio.sleep(0.01)
                os.kill(service.gateways[0], signal.SIGKILL)
                while await metric(service, "nouscoder_verifier_processes_replaced_total") < 1:
                    await asyncio.sleep(0.05)
                while await metric(service, "nouscoder_verifier_processes") < 2:
                    await asyncio.sleep(0.05)
            stop.set()
        assert sum(sender.num_lost > 0 for sender in senders) <= 4, "those of the killed process, of seven connections"
        assert len(service.gateways) == 2

        late = asyncio.create_task(client.post("/v1/grade", json=request("import time; time.sleep(1.5); print(1)")))
        async with asyncio.timeout(_LIMIT_S):
            while not await busy(client):
                await asyncio.sleep(0.02)
        gateways = service.gateways
        service.process.terminate()
        assert (await late).json()["verdict"] == "accepted", "a submission in progress gets its verdict"
        assert await service.process.wait() == 0
        await until_ended(gateways)


@asynccontextmanager
async def gateways_kept(patience: SilenceLimit) -> AsyncIterator[Gateways]:
    """Yields two gateway processes that are replaced when they end or hang."""
    folder = Path(tempfile.mkdtemp(prefix="nouscoder-gateways-"))
    config = load_config(None, ["verifier.processes=2", "verifier.sandbox.slots=2", "verifier.leave_s=0"])
    places = [ProcessNumber(index, 2, folder) for index in range(2)]
    sections = [section_of(config.verifier, place, 2, "127.0.0.1:0") for place in places]
    orders = [
        Order(config.model_copy(update={"verifier": section}), False, place)
        for section, place in zip(sections, places, strict=True)
    ]
    gateways = Gateways([Gateway(order) for order in orders], folder, patience)
    keepers: list[asyncio.Task[None]] = []
    try:
        async with asyncio.timeout(_LIMIT_S):
            await gateways.start()
        keepers += [asyncio.create_task(gateways.keep(one)) for one in gateways.all]
        yield gateways
    finally:
        for keeper in keepers:
            keeper.cancel()
        await gateways.stop(_LIMIT_S)
        shutil.rmtree(folder)


def hung_and_replaced(gateways: Gateways) -> tuple[float, float]:
    samples = {sample.name: sample.value for family in gateways.metrics.collect() for sample in family.samples}
    return samples["nouscoder_verifier_processes_hung_total"], samples["nouscoder_verifier_processes_replaced_total"]


@pytest.mark.heavy
async def test_a_process_that_hangs_is_killed_and_replaced_and_the_other_goes_on() -> None:
    async with gateways_kept(SilenceLimit(ask_period_s=0.05, silence_limit_s=2.0)) as gateways:
        first, second = (one.process for one in gateways.all)
        assert first is not None
        assert second is not None
        channels = gateways.ready()
        async with asyncio.timeout(_LIMIT_S):
            while min(channel.num_answers for channel in channels) < 45:  # both answer for longer than the limit
                await asyncio.sleep(0.01)
        assert (first.returncode, second.returncode) == (None, None)
        os.kill(first.pid, signal.SIGSTOP)
        async with asyncio.timeout(_LIMIT_S):
            assert await first.wait() == -signal.SIGKILL
            while len(gateways.ready()) < 2:
                await asyncio.sleep(0.01)
        assert gateways.all[1].process is second, "the other was not replaced"
        assert second.returncode is None
        assert await asyncio.to_thread(hung_and_replaced, gateways) == (1, 1)


async def busy(client: httpx.AsyncClient) -> bool:
    return 'sandboxes{state="busy"} 1.0' in (await client.get("/metrics")).text


async def test_quotas_hold_over_both_processes_and_both_end_with_their_parent(tmp_path: Path) -> None:
    secret, line = new_api_key("team")
    (tmp_path / "tokens").write_text(f"{line}::3\n")
    before = shared_folders()
    async with serving(f"verifier.tokens_file='{tmp_path / 'tokens'}'") as service:
        statuses = []
        for _ in range(6):  # a connection each
            async with httpx.AsyncClient(base_url=service.url, timeout=_LIMIT_S) as client:
                client.headers["Authorization"] = f"Bearer {secret}"
                statuses.append((await client.post("/v1/grade", json=request("print(1)"))).status_code)
                of_all = (await client.get("/metrics")).text
        num_graded = await metric(service, "nouscoder_verifier_submissions_total")
        assert statuses == [200] * 3 + [429] * 3
        assert num_graded == 3
        assert 'nouscoder_verifier_client_submissions_total{client="team"} 3.0' in of_all, "each process tells of all"
        gateways = service.gateways
        service.process.kill()
        await service.process.wait()
        await until_ended(gateways)
        assert shared_folders() <= before


def shared_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("nouscoder-gateways-*"))


async def test_a_host_that_cannot_grade_is_one_sentence_and_exit_code_78() -> None:
    command = [sys.executable, "-m", "nouscoder", "serve", "verifier", "--grpc", "127.0.0.1:0"]
    for one in ("verifier.processes=2", "verifier.sandbox.slots=2", "verifier.sandbox.python='/nowhere/python'"):
        command += ["--set", one]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(_LIMIT_S):
        _, said = await process.communicate()
    assert process.returncode == 78, said
    assert said.decode().count("nouscoder: the local sandbox cannot start") == 1, said
