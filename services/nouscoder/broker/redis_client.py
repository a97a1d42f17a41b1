"""The client for the URL of a Redis: one server, or the master that Sentinels name.

redis://HOST:PORT/DB, rediss:// (TLS), unix://PATH, and redis+sentinel://[USER:PASSWORD@]HOST:PORT,HOST:PORT/MASTER[/DB]
or rediss+sentinel:// (TLS to master and Sentinels). Both accept the options that redis-py
reads from the query of its URLs, such as ?ssl_ca_certs=FILE.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

import redis.asyncio
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import ConstantBackoff

from nouscoder.broker.errors import RedisAddressUnusable

_SENTINEL = "+sentinel"
_SENTINEL_PORT = 26379
# Redis runs one command at a time: with more connections, commands would wait there instead of here.
_MAX_CONNECTIONS = 32
_POOL_PATIENCE_S = 20.0
_OF_THE_POOL = ("max_connections", "timeout")


def open_client(url: str, timeout_s: float) -> redis.asyncio.Redis:
    """A client; nothing is connected yet. Raises RedisAddressUnusable."""
    # When all connections are in use, a command waits for one. A command is tried twice, because a pooled connection is
    # dead after a restart of Redis.
    common: dict[str, Any] = {
        "max_connections": _MAX_CONNECTIONS,
        "timeout": _POOL_PATIENCE_S,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(ConstantBackoff(0.05), 1),
    }
    try:
        if not url.partition("://")[0].endswith(_SENTINEL):
            return redis.asyncio.Redis.from_pool(redis.asyncio.BlockingConnectionPool.from_url(url, **common))
        return _master_of(url, common)
    except (ValueError, TypeError) as error:
        raise RedisAddressUnusable(f"the URL of Redis cannot be used: {error}") from error


def _master_of(url: str, common: dict[str, Any]) -> redis.asyncio.Redis:
    parts = urlsplit(url)
    is_encrypted = parts.scheme.startswith("rediss")
    user, _, addresses = parts.netloc.rpartition("@")
    name, _, password = user.partition(":")
    master, _, database = parts.path.strip("/").partition("/")
    if not master:
        raise ValueError("a Sentinel URL ends with /MASTER, the name of the master")
    # redis-py converts the options of the query by their names.
    options = {k: v for k, v in parse_url(f"redis://host?{parts.query}").items() if k not in ("host", "port", "db")}
    options |= {**common, "ssl": is_encrypted}
    logins = {"username": unquote(name) or None, "password": unquote(password) or None}
    sentinels: Any = Sentinel(  # type: ignore[no-untyped-call]
        [_host_and_port(one) for one in addresses.split(",")],
        sentinel_kwargs={name: value for name, value in {**options, **logins}.items() if name not in _OF_THE_POOL},
    )
    client: redis.asyncio.Redis = sentinels.master_for(
        unquote(master), connection_pool_class=_BlockingSentinelPool, db=int(database or 0), **options, **logins
    )
    return client


class _BlockingSentinelPool(SentinelConnectionPool, redis.asyncio.BlockingConnectionPool):
    """Connections to the master. When all are in use, a command waits for one."""


def _host_and_port(address: str) -> tuple[str, int]:
    host, separator, port = address.rpartition(":")
    if not separator:
        host, port = address, str(_SENTINEL_PORT)
    if not host or not port.isdigit():
        raise ValueError(f"{address!r} is not HOST:PORT of a Sentinel")
    return host.strip("[]"), int(port)
