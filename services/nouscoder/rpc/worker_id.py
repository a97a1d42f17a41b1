"""The name under which a worker process holds leases.

A worker id is a name and an incarnation. The broker frees the leases of a former incarnation as soon as a newer one
of the same name asks for work, so that a restarted worker does not wait until its old leases run out.

INVARIANT: two live processes of a run never have the same name, and a process that is restarted in its network
namespace gets the name of a dead process of the run, if there is one and a slot is free.

The name contains a slot. A process holds its slot as an abstract unix socket, which the kernel releases when the
process ends, however it ends. Such sockets belong to a network namespace, so the name also contains the machine's boot
id and the inode of the network namespace: containers and machines that share a hostname do not share names.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

log = logging.getLogger(__name__)

_MAX_SLOTS = 4096
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK_NAMESPACE = Path("/proc/self/ns/net")


@contextmanager
def held_worker_id(service: str, run: str) -> Iterator[str]:
    """A worker id whose name no other live process has, for the time of the context."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        slot = _bind_free_slot(sock, service, run)
        yield f"{service}-{socket.gethostname()}-{_place()}-{slot}-{_incarnation()}"
    finally:
        sock.close()


def sole_worker_id(service: str) -> str:
    """A worker id of a service with one process in a run (by a lock). Its name is the same on every machine."""
    return f"{service}-{_incarnation()}"


def observer_id(service: str) -> str:
    """An id for a client that never leases work."""
    return f"{service}-{socket.gethostname()}-{_incarnation()}"


def _bind_free_slot(sock: socket.socket, service: str, run: str) -> int:
    # A socket address has room for 107 bytes, and the name of a run may be 100 bytes long.
    run_digest = blake2b(run.encode(), digest_size=8).hexdigest()
    for slot in range(_MAX_SLOTS):
        try:
            sock.bind(f"\0nouscoder/{service}/{run_digest}/{slot}")
        except OSError:  # another process holds it
            continue
        return slot
    # Every user of the host can hold such sockets. Without a slot the name is new, and nobody is kept out.
    log.warning("no slot is free: a restarted worker will not have this one's name", extra={"slots": _MAX_SLOTS})
    return _MAX_SLOTS + secrets.randbelow(2**62)


def _place() -> str:
    """Identifies this network namespace among all machines and boots. Random if the kernel hides them."""
    try:
        known = f"{_BOOT_ID.read_text()}/{_NETWORK_NAMESPACE.stat().st_ino}"
    except OSError:
        return secrets.token_hex(6)
    return blake2b(known.encode(), digest_size=6).hexdigest()


def _incarnation() -> str:
    return f"{os.getpid()}.{secrets.token_hex(3)}"
