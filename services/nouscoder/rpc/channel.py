"""Client side of gRPC: channels, the base of every service's client, and the one mapping of gRPC's errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Generic, Self, TypeVar

import grpc

from nouscoder.errors import ExitCode, NousCoderError
from nouscoder.retry import Retry
from nouscoder.rpc.server import MAX_MESSAGE_BYTES
from nouscoder.rpc.status_codes import ERROR_TRAILER, RUN_AGENT
from nouscoder.rpc.tls import ChannelTls

Answer = TypeVar("Answer")
Stub = TypeVar("Stub")

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A restarted peer listens on the same address, or on another one under the same name: reconnect soon, and resolve
    # the name again. The "min" is how long one attempt to connect may take, TLS included.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 3000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # A peer whose machine is gone sends nothing: it is given up after 5 + 10 s. TCP_USER_TIMEOUT follows these.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 10000),
    ("grpc.http2.ping_timeout_ms", 10000),  # a minute otherwise, whatever the keepalive's own limit is
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
]


class PeerError(NousCoderError):
    """A service did not answer as it should; the message names the service."""


class PeerUnreachable(PeerError):
    """A service did not answer in time, is starting or is stopping: the same call may succeed later."""

    exit_code = ExitCode.UNAVAILABLE


class PeerBusy(PeerError):
    """A service has no room for more work now: the same call may succeed later."""

    exit_code = ExitCode.UNAVAILABLE


class PeerRefused(PeerError):
    """A service refuses what was asked: the same call will not succeed."""


class PeerBehind(PeerError):
    """A service lacks what the caller has done: the caller must restore it, then the same call may succeed."""


class PeerNotFound(PeerRefused):
    """A service does not have what was asked for."""


_ERRORS: dict[grpc.StatusCode, type[PeerError]] = {
    grpc.StatusCode.UNAVAILABLE: PeerUnreachable,
    grpc.StatusCode.DEADLINE_EXCEEDED: PeerUnreachable,
    grpc.StatusCode.CANCELLED: PeerUnreachable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: PeerBusy,
    grpc.StatusCode.INVALID_ARGUMENT: PeerRefused,
    grpc.StatusCode.FAILED_PRECONDITION: PeerRefused,
    grpc.StatusCode.NOT_FOUND: PeerNotFound,
    grpc.StatusCode.ABORTED: PeerBehind,
}


def peer_error(name: str, error: grpc.aio.AioRpcError) -> PeerError:
    """The error of the service `name` for a gRPC error; raise it `from` that."""
    kind = _ERRORS.get(error.code(), PeerError)
    return kind(f"{name}: {error.code().name}: {error.details()}")


def _told(error: BaseException | None) -> str:
    """What the service itself said that cannot serve now, for example that its Redis is away; else empty."""
    if isinstance(error, grpc.aio.AioRpcError) and ERROR_TRAILER in error.trailing_metadata():
        return f": {error.details()}"
    return ""


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, run: str = "", server_name: str = ""
) -> grpc.aio.Channel:
    """A channel to `address`, encrypted with credentials (see tls.py); close it when done.

    With a `run` a service that serves another run answers UNAVAILABLE. The service's certificate must have
    `server_name`, by default the host of the address.
    """
    options = [*_OPTIONS, ("grpc.primary_user_agent", f"{RUN_AGENT}{run}")] if run else _OPTIONS
    if server_name:
        options = [*options, ("grpc.ssl_target_name_override", server_name)]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


_START_S = 30.0  # a service may take so long to start; then its silence is logged


class ServiceClient(Generic[Stub]):
    """Base of the clients, one a service: a channel, its stub, patience, and errors in words.

    Use as `async with`. A call that the service does not answer is repeated for `patience_s` seconds: methods of all
    services are idempotent. Then PeerUnreachable is raised. With a `run` the service answers only if it serves it.
    """

    def __init__(
        self,
        service: str,
        stub: Callable[[grpc.aio.Channel], Stub],
        address: str,
        patience_s: float,
        credentials: ChannelTls | None = None,
        run: str = "",
        server_name: str = "",
    ) -> None:
        self._make_stub = stub
        self._run, self._server_name = run, server_name
        self.name = f"{service} at {address}"
        self._address = address
        self._patience_s = patience_s
        self._credentials = credentials
        self._opened_with: grpc.ChannelCredentials | None = None
        self._channels: list[grpc.aio.Channel] = []  # the newest one is last

    async def __aenter__(self) -> Self:
        self._open()
        return self

    def _open(self) -> None:
        self._opened_with = self._credentials.current() if self._credentials is not None else None
        self._channels.append(open_channel(self._address, self._opened_with, self._run, self._server_name))
        self._stub = self._make_stub(self._channels[-1])

    async def __aexit__(self, *error: object) -> None:
        for channel in self._channels:
            await channel.close()

    async def _call(self, call: Callable[[], Awaitable[Answer]], patience_s: float | None = None) -> Answer:
        """The answer of an idempotent call. Raises PeerError; PeerUnreachable when the patience is over."""
        limit_s = self._patience_s if patience_s is None else patience_s

        async def once() -> Answer:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                # Calls of the channel before end there.
                if self._credentials is not None and self._credentials.current() is not self._opened_with:
                    self._open()
                raise peer_error(self.name, error) from error

        try:
            return await Retry(self.name, (PeerUnreachable,), for_s=limit_s, log_after_s=_START_S).call(once)
        except PeerUnreachable as error:
            how = f"has not answered for {limit_s:.0f} s" if limit_s else "does not answer"
            message = f"{self.name} {how}{_told(error.__cause__)}"
            raise PeerUnreachable(message) from error.__cause__

    async def _stream(self, call: Any, silence_limit_s: float) -> AsyncGenerator[Any, None]:
        """Each message of a streaming call. Raises PeerError; PeerUnreachable after a silence of that length."""
        try:
            while True:
                # Not wait_for, which swallows a cancellation that comes together with a message (Python 3.11).
                async with asyncio.timeout(silence_limit_s):
                    answer = await call.read()
                if answer is grpc.aio.EOF:
                    return
                yield answer
        except TimeoutError as error:
            raise PeerUnreachable(f"{self.name} sent nothing for {silence_limit_s:.0f} s") from error
        except grpc.aio.AioRpcError as error:
            raise peer_error(self.name, error) from error
        finally:
            call.cancel()
