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
