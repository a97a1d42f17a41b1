"""The addresses of a service of several processes. The parent has them from the start, so nobody else takes them."""

from __future__ import annotations

import socket

from nouscoder.rpc.server import AddressError, socket_host, split_address


def bound_to(address: str, *, shared: bool = False) -> socket.socket:
    """A socket that has the address and does not listen. With `shared` other sockets of this user may listen there.

    Raises AddressError, also when a service that shares its address has it.
    """
    host, port = split_address(address)
    host = socket_host(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if not shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        if shared:
            at = bound.getsockname()[:2]
            bound.close()
            bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(at)
    except OSError as error:
        bound.close()
        raise AddressError(f"cannot listen on {address}: {error.strerror or error}") from error
    return bound


def address_of(address: str, bound: socket.socket) -> str:
    """The address in use; port 0 took a free one."""
    host, _ = split_address(address)
    return f"{host}:{bound.getsockname()[1]}"
