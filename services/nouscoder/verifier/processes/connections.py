"""The connections of several gateway processes: addresses, and the channel from the parent to each process.

The parent has the addresses from the start, so nobody else takes them. It passes accepted connections to the processes,
and asks them whether they answer. The kernel could divide connections among sockets that share an address, but by
chance: as many connections as processes reached 70 % of the processes, and each has its own slots.

INVARIANT: each accepted connection goes to exactly one process that takes calls, the one with the fewest open
connections. While there is none, connections wait in the backlog of the listening socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence

from nouscoder.rpc.addresses import AddressError, socket_host, split_address

log = logging.getLogger(__name__)

READY = b"ready"
_CONNECTION, _ASK, _ANSWER = b"c", b"ask", b"answer"
_CLOSED = struct.Struct("=Q")  # how many connections the process has closed since its start
_AT_ONCE = 64
_PAUSE_S = 0.05


class Channel:
    """The parent's end of the socket to one gateway process."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._num_sent = self._num_closed = 0
        self.num_answers = 0
        self.is_ready = False
        self.ready = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._ours.fileno(), self._read)

    @property
    def num_open(self) -> int:
        """Connections of the process."""
        return self._num_sent - self._num_closed

    def pass_on(self, connection: socket.socket) -> bool:
        """Give a connection to the process. Returns False when it takes none now."""
        try:
            socket.send_fds(self._ours, [_CONNECTION], [connection.fileno()])
        except OSError:
            return False
        self._num_sent += 1
        return True

    def ask(self) -> None:
        """Ask the process for an answer, which `num_answers` counts."""
        with contextlib.suppress(OSError):  # it reads nothing, or has ended: then no answer comes
            self._ours.send(_ASK)

    def _read(self) -> None:
        try:
            message = self._ours.recv(64)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self.is_ready = False
            asyncio.get_running_loop().remove_reader(self._ours.fileno())
        elif message == READY:
            self.is_ready = True
            self.ready.set()
        elif message == _ANSWER:
            self.num_answers += 1
        elif len(message) == _CLOSED.size:
            (self._num_closed,) = _CLOSED.unpack(message)

    def close(self) -> None:
        """Close both ends. The process sees that as the end of its parent. Can be called again."""
        self.is_ready = False
        if self._ours.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._ours.fileno())
        self._ours.close()
        self.theirs.close()


class Distributor:
    """Accepts connections and passes each to one of `receivers()`."""

    def __init__(self, listening: socket.socket, receivers: Callable[[], Sequence[Channel]]) -> None:
        """`listening` has been bound; it begins to listen with `start`."""
        self._listening = listening
        self._receivers = receivers
        self._turns = itertools.count()
        self._is_open = False

    def start(self) -> None:
        """Accept from now on."""
        self._listening.setblocking(False)
        self._listening.listen(1024)
        self._is_open = True
        self._resume()

    def _resume(self) -> None:
        if self._is_open:
            asyncio.get_running_loop().add_reader(self._listening.fileno(), self._accept)

    def _pause(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listening.fileno())
        loop.call_later(_PAUSE_S, self._resume)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            if not self._receivers():
                self._pause()
                return
            try:
                connection, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.ECONNABORTED, errno.EINTR):
                    log.error("cannot accept connections", extra={"detail": str(error)})
                    self._pause()
                    return
                continue
            with connection:
                self._give(connection)

    def _give(self, connection: socket.socket) -> None:
        """To the process with the fewest connections; of equal ones each in turn. Closed when none takes it."""
        receivers = self._receivers()
        first = next(self._turns) % len(receivers)
        for receiver in sorted((*receivers[first:], *receivers[:first]), key=lambda one: one.num_open):
            if receiver.pass_on(connection):
                return

    def close(self) -> None:
        """Accept no more."""
        if self._is_open:
            self._is_open = False
            asyncio.get_running_loop().remove_reader(self._listening.fileno())
        self._listening.close()


class Arrivals:
    """The process's end: takes connections, tells the parent when one has been closed, and answers it.

    The answer comes from the event loop that also serves the requests, so a blocked loop does not answer.
    """

    def __init__(self, channel: socket.socket, parent_ended: Callable[[], None]) -> None:
        self._channel = channel
        self._channel.setblocking(False)
        self._parent_ended = parent_ended
        self.take: Callable[[socket.socket, Callable[[], None]], Awaitable[None]] | None = None
        self._num_closed = 0
        self._tasks: set[asyncio.Task[None]] = set()
        asyncio.get_running_loop().add_reader(channel.fileno(), self._read)

    def say_ready(self) -> None:
        """Tell the parent that this process takes connections."""
        with contextlib.suppress(OSError):  # the parent has ended, which `_read` sees
            self._channel.send(READY)

    def _read(self) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._channel, 64, 1)
        except BlockingIOError:
            return
        except OSError:
            message, descriptors = b"", []
        if not message:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._parent_ended()
        elif message == _ASK:
            with contextlib.suppress(OSError):  # a full channel: the parent reads on, and asks again
                self._channel.send(_ANSWER)
        for descriptor in descriptors:
            connection = socket.socket(fileno=descriptor)
            if self.take is None:
                connection.close()
                continue
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = asyncio.ensure_future(self.take(connection, self._closed))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _closed(self) -> None:
        self._num_closed += 1
        with contextlib.suppress(OSError):  # a full channel: the next message has the whole number too
            self._channel.send(_CLOSED.pack(self._num_closed))


# The addresses.


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
