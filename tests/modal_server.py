"""A local server that speaks Modal's protobuf, for the real client library: real agents in place of containers.

Each container is the agent of runner/ as a process of this machine on the host's kernel (Modal's runtime `vm`), behind
a TLS relay in place of Modal's tunnel. The server ends containers after their timeout, as Modal does, and counts what
they cost by itself. `faults` says which of them go wrong, and how.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import socket
import ssl
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from grpclib import GRPCError, Status
from grpclib.server import Server
from modal_proto import api_pb2
from modal_proto.api_grpc import ModalClientBase
from tests.certificates import make_certificate

from nouscoder.verifier.harness import __file__ as harness_init
from nouscoder.verifier.runner import __file__ as runner_init
from nouscoder.verifier.sandbox.init_build import init_library_path

TOKEN = ("ak-test", "as-test")
_JWT = ".".join(("e30", base64.urlsafe_b64encode(json.dumps({"exp": time.time() + 86400}).encode()).decode(), "x"))
_PAGE = b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n"


class Fault(StrEnum):
    """What goes wrong with one container."""

    REFUSED = "creation refused"
    RATE_LIMITED = "rate limited"
    UNKNOWN = "created, but the answer is lost"
    SLOW = "slow creation"
    LOST = "sandbox lost"
    CUT = "output cut"
    WRONG_BYTES = "wrong bytes"


Faults = Callable[[int], "Fault | None"]


@dataclass
class Container:
    """A running container and its tunnel."""

    id: str
    request: Any
    process: asyncio.subprocess.Process
    agent_port: int
    fault: Fault | None
    begun_s: float
    relay: asyncio.Server | None = None
    connections: set[asyncio.StreamWriter] = field(default_factory=set)
    end_task: asyncio.Task[None] | None = None
    num_connections: int = 0

    @property
    def lifetime_s(self) -> float:
        """After this time it is ended."""
        return float(self.request.definition.timeout_secs)

    @property
    def dollars(self) -> float:
        """What it has cost until now. This server may end it late, and Modal does not."""
        return min(self.lifetime_s, time.monotonic() - self.begun_s) * self.dollars_a_second

    @property
    def dollars_a_second(self) -> float:
        """By the limits of cores and memory, which are the most that Modal can bill."""
        resources = self.request.definition.resources
        return float(resources.milli_cpu_max / 1000 * 0.00003942 + resources.memory_mb_max / 1024 * 0.00000672)


def _no_faults(number: int) -> Fault | None:
    return None


async def _unimplemented(self: object, stream: Any) -> None:
    request = await stream.recv_message()
    raise GRPCError(Status.UNIMPLEMENTED, f"this test server has no call for {type(request).__name__}")


_Base: type[Any] = type("_Base", (ModalClientBase,), dict.fromkeys(ModalClientBase.__abstractmethods__, _unimplemented))


class ModalServer(_Base):  # type: ignore[misc]
    """See the module. Public fields are for tests to read."""

    def __init__(self, folder: Path, faults: Faults = _no_faults) -> None:
        self.faults = faults
        self.containers: dict[str, Container] = {}
        self.requests: list[Any] = []
        self._asked_s: dict[str, float] = {}  # when each creation was asked for first
        self.images: list[Any] = []
        self.happened: Counter[Fault] = Counter()
        self.most_containers = 0
        self.paid = 0.0
        self.most_committed_dollars = 0.0
        self.url = ""
        self.tokens: set[tuple[str, str]] = {TOKEN}
        self._folder = folder
        self._numbers = itertools.count()
        self._ending: set[asyncio.Task[None]] = set()
        self._server = Server([self])

    @property
    def dollars(self) -> float:
        """What all containers have cost until now."""
        return self.paid + sum(one.dollars for one in self.containers.values())

    @property
    def committed_dollars(self) -> float:
        """What all containers will have cost if each living one lives as long as it may."""
        return self.paid + sum(one.lifetime_s * one.dollars_a_second for one in self.containers.values())

    def most_creations_within(self, seconds: float) -> int:
        """The most creations that were asked for in any period of so many seconds.

        Modal's client itself repeats a request that was rate limited, with the same key. That is the same creation.
        """
        times = sorted(self._asked_s.values())
        return max((bisect_left(times, begun_s + seconds) - at for at, begun_s in enumerate(times)), default=0)

    async def start(self) -> None:
        """Listen on a free port of loopback."""
        make_home(self._folder)
        make_certificate(self._folder)
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(self._folder / "tls.crt", self._folder / "tls.key")
        port = _free_port()
        await self._server.start("127.0.0.1", port)
        self.url = f"http://127.0.0.1:{port}"

    async def close(self) -> None:
        """End everything."""
        for container in list(self.containers.values()):
            await self.end(container)
        await asyncio.gather(*self._ending)
        self._server.close()
        await self._server.wait_closed()

    async def end(self, container: Container) -> None:
        """End a container with its connections, and count its cost."""
        if self.containers.pop(container.id, None) is None:
            return
        self.paid += container.dollars
        if container.end_task is not None and container.end_task is not asyncio.current_task():
            container.end_task.cancel()
        if container.relay is not None:
            container.relay.close()
        for writer in list(container.connections):
            writer.transport.abort()
        if container.process.returncode is None:
            container.process.kill()
        await container.process.wait()

    # The calls of Modal's client.

    async def ClientHello(self, stream: Any) -> None:  # noqa: N802
        await self._request(stream)
        await stream.send_message(api_pb2.ClientHelloResponse())

    async def AppGetOrCreate(self, stream: Any) -> None:  # noqa: N802
        await self._request(stream)
        await stream.send_message(api_pb2.AppGetOrCreateResponse(app_id="ap-1"))

    async def EnvironmentGetOrCreate(self, stream: Any) -> None:  # noqa: N802
        await self._request(stream)
        metadata = api_pb2.EnvironmentMetadata(name="main")
        metadata.settings.image_builder_version = "2025.06"
        await stream.send_message(api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata))

    async def ImageGetOrCreate(self, stream: Any) -> None:  # noqa: N802
        request = await self._request(stream)
        self.images.append(request.image)
        result = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
        await stream.send_message(api_pb2.ImageGetOrCreateResponse(image_id=f"im-{len(self.images)}", result=result))

    async def MountPutFile(self, stream: Any) -> None:  # noqa: N802
        await self._request(stream)
        await stream.send_message(api_pb2.MountPutFileResponse(exists=True))

    async def MountBatchedCheckExistence(self, stream: Any) -> None:  # noqa: N802
        await self._request(stream)
        await stream.send_message(api_pb2.MountBatchedCheckExistenceResponse())

    async def MountGetOrCreate(self, stream: Any) -> None:  # noqa: N802
        await self._request(stream)
        await stream.send_message(api_pb2.MountGetOrCreateResponse(mount_id="mo-1"))

    async def AuthTokenGet(self, stream: Any) -> None:  # noqa: N802
        await self._request(stream)
        await stream.send_message(api_pb2.AuthTokenGetResponse(token=_JWT))

    async def SandboxCreateV2(self, stream: Any) -> None:  # noqa: N802
        request = await self._request(stream)
        self.requests.append(request)
        self._asked_s.setdefault(stream.metadata["x-idempotency-key"], time.monotonic())
        number = next(self._numbers)
        fault = self.faults(number)
        if fault in (Fault.REFUSED, Fault.RATE_LIMITED):
            self.happened[fault] += 1
            if fault is Fault.REFUSED:
                raise GRPCError(Status.RESOURCE_EXHAUSTED, "no capacity")
            details = [api_pb2.RPCRetryPolicy(retry_after_secs=0.2)]
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "too many creations", details)
        if fault is Fault.SLOW:
            self.happened[fault] += 1
            await asyncio.sleep(1.0)
        container = await self._run(number, request, fault)
        if fault is Fault.UNKNOWN:
            self.happened[fault] += 1
            raise GRPCError(Status.FAILED_PRECONDITION, "the answer was lost")
        assert container.relay is not None
        port = container.relay.sockets[0].getsockname()[1]
        tunnel = api_pb2.TunnelData(host="127.0.0.1", port=port, container_port=7070)
        await stream.send_message(
            api_pb2.SandboxCreateV2Response(sandbox_id=container.id, task_id=f"ta-{number}", tunnels=[tunnel])
        )

    async def SandboxListV2(self, stream: Any) -> None:  # noqa: N802
        request = await self._request(stream)
        wanted = {tag.tag_name: tag.tag_value for tag in request.tags}
        found = []
        for one in self.containers.values():
            has = {tag.tag_name: tag.tag_value for tag in one.request.tags}
            created = 1000.0 + int(one.id.rpartition("-")[2])
            if wanted.items() <= has.items() and not 0 < request.before_timestamp <= created:
                found.append(api_pb2.SandboxInfo(id=one.id, created_at=created))
        found.sort(key=lambda info: -info.created_at)
        await stream.send_message(api_pb2.SandboxListResponse(sandboxes=found[:10]))

    async def SandboxTagsGetV2(self, stream: Any) -> None:  # noqa: N802
        container = self._known(await self._request(stream))
        await stream.send_message(api_pb2.SandboxTagsGetResponse(tags=container.request.tags))

    async def SandboxWaitV2(self, stream: Any) -> None:  # noqa: N802
        self._known(await self._request(stream))
        await stream.send_message(api_pb2.SandboxWaitResponse())

    async def SandboxTerminateV2(self, stream: Any) -> None:  # noqa: N802
        await self.end(self._known(await self._request(stream)))
        await stream.send_message(api_pb2.SandboxTerminateResponse())

    def _known(self, request: Any) -> Container:
        if request.sandbox_id not in self.containers:
            raise GRPCError(Status.NOT_FOUND, "no such sandbox")
        return self.containers[request.sandbox_id]

    async def _request(self, stream: Any) -> Any:
        request = await stream.recv_message()
        token = tuple(stream.metadata.get(f"x-modal-token-{part}", "") for part in ("id", "secret"))
        if token not in self.tokens:
            raise GRPCError(Status.UNAUTHENTICATED, "Token validation failed")
        return request

    # The containers.

    async def _run(self, number: int, request: Any, fault: Fault | None) -> Container:
        """Start the agent as Modal would start the container: with its arguments and the secrets' environment."""
        definition, port = request.definition, _free_port()
        environment = {name: value for source in request.secret_sources for name, value in source.env.contents.items()}
        environment |= {"NOUSCODER_RUNNER_PORT": str(port), "NOUSCODER_RUNNER_HOME": str(self._folder / "home")}
        program, *arguments = definition.entrypoint_args
        assert program == "python3"
        assert arguments[-1] == "/opt/nouscoder/runner/__main__.py"
        arguments[-1] = str(Path(runner_init).with_name("__main__.py"))
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, env=environment, stderr=asyncio.subprocess.PIPE, start_new_session=True
        )
        assert process.stderr is not None
        line = await process.stderr.readline()
        assert b"listening" in line, line
        container = Container(f"sb-v2-{number}", request, process, port, fault, time.monotonic())
        container.relay = await asyncio.start_server(
            lambda reader, writer: self._relay(container, reader, writer), "127.0.0.1", 0, ssl=self._tls
        )
        self.containers[container.id] = container
        self.most_containers = max(self.most_containers, len(self.containers))
        self.most_committed_dollars = max(self.most_committed_dollars, self.committed_dollars)
        container.end_task = asyncio.create_task(self._end_later(container, container.lifetime_s))
        return container

    async def _end_later(self, container: Container, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)
        await self.end(container)

    async def _relay(self, container: Container, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        container.num_connections += 1
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", container.agent_port)
        except OSError:
            writer.transport.abort()
            return
        container.connections |= {writer, inner_writer}
        outward = asyncio.create_task(self._copy(container, inner_reader, writer))
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(1 << 16):
                    inner_writer.write(data)
                    await inner_writer.drain()
        finally:
            outward.cancel()
            for one in (writer, inner_writer):
                one.transport.abort()
            container.connections -= {writer, inner_writer}

    async def _copy(self, container: Container, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what the container says. The third connection (probe, canary, first slot) meets the fault."""
        left = 3000 if container.fault is not None and container.num_connections > 2 else sys.maxsize
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                left -= len(data)
                if left < 0 and container.fault in (Fault.LOST, Fault.CUT, Fault.WRONG_BYTES):
                    await self._break(container, data, writer)
                    return
                writer.write(data)
                await writer.drain()
        writer.transport.abort()

    async def _break(self, container: Container, data: bytes, writer: asyncio.StreamWriter) -> None:
        fault, container.fault = container.fault, None
        assert fault is not None
        self.happened[fault] += 1
        if fault is Fault.LOST:
            self._ending.add(asyncio.create_task(self.end(container)))
            return
        writer.write(data[: len(data) // 2] if fault is Fault.CUT else _PAGE)
        await writer.drain()
        writer.close()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def modal_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch, faults: Faults = _no_faults
) -> AsyncIterator[ModalServer]:
    """A running server to which Modal's client connects, and whose tunnels it trusts."""
    server = ModalServer(folder, faults)
    await server.start()
    monkeypatch.setenv("MODAL_SERVER_URL", server.url)
    monkeypatch.setenv("MODAL_TOKEN_ID", TOKEN[0])
    monkeypatch.setenv("MODAL_TOKEN_SECRET", TOKEN[1])
    monkeypatch.setenv("MODAL_CONFIG_PATH", os.devnull)
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "ca.crt"))
    try:
        yield server
    finally:
        await server.close()


def make_home(folder: Path) -> None:
    """Make what the image has at /opt/nouscoder in `folder`/home: NOUSCODER_RUNNER_HOME of an agent."""
    home = folder / "home"
    (home / "init").mkdir(parents=True)
    (home / "harness").symlink_to(Path(harness_init).parent)
    (home / "init" / "init.so").symlink_to(init_library_path())
