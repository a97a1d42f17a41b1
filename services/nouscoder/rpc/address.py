"""Addresses to listen on."""

from __future__ import annotations

from nouscoder.errors import Unusable


class AddressError(Unusable):
    """An address cannot be listened on; the message names it."""


def split_address(address: str) -> tuple[str, int]:
    """Host and port of a text HOST:PORT. Raises AddressError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise AddressError(f"{address!r} is not of the form host:port")
    return host, int(port)


def socket_host(host: str) -> str:
    """The host as sockets want it: an address of IPv6 without its brackets. On Linux, `::` takes IPv4 too."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host
