"""Addresses to listen on: HOST:PORT, and unix:PATH for a service whose callers are processes of one user.

The services of a local run have sockets in a folder that only its user can enter. So no other user of the host can call
them, and nobody else can listen where they do.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from nouscoder.errors import Unusable

_UNIX = "unix:"


class AddressError(Unusable):
    """An address cannot be listened on; the message names it."""


def split_address(address: str) -> tuple[str, int]:
    """Host and port of a text HOST:PORT. Raises AddressError."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        raise AddressError(f"{address!r} is not of the form host:port")
    if len(port) > 5 or int(port) > 65535:
        raise AddressError(f"{address!r}: a port is at most 65535")
    return host, int(port)


def require_url(url: str, what: str) -> None:
    """Raises AddressError when `url`, which is `what`, is not of the form http://HOST:PORT or https://HOST."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no such port or host
        is_url = False
    if not is_url:
        form = url if url and "://" not in url and "/" not in url else "HOST:PORT"
        raise AddressError(f"{what} cannot be {url!r:.80}: write http://{form:.80}")


def require_free(address: str) -> None:
    """Raises AddressError when a process could not listen at HOST:PORT now."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((socket_host(host), port), family=family).close()
    except OSError as error:
        raise AddressError(f"cannot listen on {address}: {error.strerror}") from error


def socket_host(host: str) -> str:
    """The host as sockets want it: an address of IPv6 without its brackets. On Linux, `::` takes IPv4 too."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def unix_address(path: Path) -> str:
    """The address of a socket with this path, which has only characters that every client takes as they are."""
    return f"{_UNIX}{path}"


def unix_path(address: str) -> Path | None:
    """The path of the socket; None when the address is not unix:PATH."""
    return Path(address.removeprefix(_UNIX)) if address.startswith(_UNIX) else None


def refuse_taken(path: Path) -> None:
    """Raises AddressError when a process listens at the socket. The file of one that has ended is no hindrance."""
    if path.is_dir() or not path.parent.is_dir() or len(os.fsencode(path)) > 107:
        raise AddressError(f"cannot listen on {_UNIX}{path}: name a new file in a folder, with at most 107 bytes")
    with socket.socket(socket.AF_UNIX) as caller:
        if caller.connect_ex(str(path)) == 0:
            raise AddressError(f"cannot listen on {_UNIX}{path}: another process listens there")
