"""How a worker process holds leases: its name, and its heartbeats.

A worker id is a name and an incarnation. The broker frees the leases of a former incarnation as soon as a newer one
of the same name asks for work, so that a restarted worker does not wait until its old leases run out.

INVARIANT: two live processes of a run never have the same name, and a process that is restarted in its network
namespace gets the name of a dead process of the run, if there is one and a slot is free.

The name contains a slot. A process holds its slot as an abstract unix socket, which the kernel releases when the
process ends, however it ends. Such sockets belong to a network namespace, so the name also contains the machine's boot
id and the inode of the network namespace: containers and machines that share a hostname do not share names.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Self

from nouscoder.domain.lease import Lease, LeaseLoss, WorkReport
from nouscoder.rpc.channel import PeerError, PeerUnreachable

log = logging.getLogger(__name__)

# Heartbeats in the length of a lease: two may be lost.
_BEATS_A_LEASE = 3


# BrokerClient.heartbeat: extends leases; returns the lost ones, each with the reason.
Heartbeat = Callable[[Sequence[str], WorkReport | None], Awaitable[dict[str, LeaseLoss]]]


class LeaseKeeper:
    """Sends heartbeats for leases, so that they last as long as the worker works on them.

    INVARIANT: each heartbeat contains a lease from when it is added until it is dropped or reported lost.
    """

    def __init__(self, heartbeat: Heartbeat, report: Callable[[], WorkReport] | None = None) -> None:
        self._heartbeat = heartbeat
        self._report = report
        self._kept: dict[str, Lease] = {}
        self._lost: dict[str, LeaseLoss] = {}
        self._changed = asyncio.Event()

    def add(self, lease: Lease) -> None:
        """Send heartbeats for this lease from now on."""
        self._kept[lease.lease_id] = lease
        self._changed.set()

    def drop(self, lease_id: str) -> None:
        """Stop sending heartbeats for this lease: its work is submitted or given up. Unknown ids are ignored."""
        self._kept.pop(lease_id, None)
        self._lost.pop(lease_id, None)

    def take_lost(self) -> dict[str, LeaseLoss]:
        """The leases lost since the last call, each with the reason: stop the work on them."""
        lost, self._lost = self._lost, {}
        return lost

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._beat_for_ever(), name="lease-keeper")
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _beat_for_ever(self) -> None:
        while True:
            while not self._kept:
                self._changed.clear()
                await self._changed.wait()
            await asyncio.sleep(min(lease.expires_in_s for lease in self._kept.values()) / _BEATS_A_LEASE)
            await self._beat()

    async def _beat(self) -> None:
        asked = list(self._kept)
        if not asked:
            return
        try:
            lost = await self._heartbeat(asked, None if self._report is None else self._report())
        except PeerUnreachable:
            return  # the next heartbeat comes soon, and leases do not expire while the broker is absent
        except PeerError as error:
            log.error("heartbeat refused", extra={"reason": str(error)})
            return
        # A lease that was dropped during the heartbeat is not lost: its work is done.
        for lease_id, reason in lost.items():
            if self._kept.pop(lease_id, None) is not None:
                self._lost[lease_id] = reason


# The name under which a worker process holds leases.

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
