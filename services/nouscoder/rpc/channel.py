"""Client side of gRPC: channels, and one mapping of foreign errors."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from nouscoder.errors import NousCoderError
from nouscoder.rpc.server import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A killed peer comes back on the same address, or another one under the same name: do not back off for minutes,
    # and ask for the name again. The "min" is how long one attempt to connect may take, TLS included.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 3000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # A peer whose machine is gone never says so: given up after 5 + 10 s without an answer. TCP_USER_TIMEOUT follows.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 10000),
    ("grpc.http2.ping_timeout_ms", 10000),  # a minute otherwise, whatever the keepalive's own limit is
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
]
_TELL_AFTER_S = 5.0
_TRANSIENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class PeerError(NousCoderError):
    """A service did not answer as it should; the message names the service."""


class PeerUnreachable(PeerError):
    """A service did not answer within the time given."""


def open_channel(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """A channel to `address`, encrypted with credentials (see tls.py); close it when done."""
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    return grpc.aio.secure_channel(address, credentials, options=_OPTIONS)


async def call_with_patience(name: str, call: Callable[[], Awaitable[Answer]], patience_s: float = 60.0) -> Answer:
    """Call an idempotent method until it answers, for at most `patience_s` seconds of unreachability.

    An absence of some seconds is told when it begins to matter and when it ends. Raises PeerUnreachable when the time
    is over and PeerError on any other failure.
    """
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    is_told = False
    delay_s = 0.1
    while True:
        try:
            answer = await call()
        except grpc.aio.AioRpcError as error:
            if error.code() not in _TRANSIENT:
                raise PeerError(f"{name}: {error.code().name}: {error.details()}") from error
            away_s = loop.time() - started_s
            if away_s >= patience_s:
                raise PeerUnreachable(f"{name} has not answered for {patience_s:.0f} s") from error
            if away_s >= _TELL_AFTER_S and not is_told:
                is_told = True
                log.warning(
                    "a service does not answer",
                    extra={"peer": name, "patience_s": patience_s, "reason": error.details()},
                )
        else:
            if is_told:
                log.info("it answers again", extra={"peer": name, "away_s": round(loop.time() - started_s, 1)})
            return answer
        await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
        delay_s = min(2 * delay_s, 2.0)
