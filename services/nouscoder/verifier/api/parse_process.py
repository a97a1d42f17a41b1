"""Parses large bodies in a process of its own, because a decoder stalls the interpreter that it runs in.

INVARIANT: at most one such process lives at a time, and it parses one body at a time. One that is silent for LIMIT_S is
killed. Nothing that a body holds is decoded in this process, except a part of the answer: a submission without its
tests, or the file of its tests.

The process runs as the service's own user and not in a sandbox: it runs no candidate code. It starts with the first
large body, ends with the service, and is replaced when it has taken much memory.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from io import BufferedRWPair
from typing import Any

from nouscoder.formats.json_size import ValueCount
from nouscoder.verifier.api.parse_worker import ANSWER, REQUEST, SIZE, Ended
from nouscoder.verifier.grading.grader import QueueFull

LIMIT_S = 60.0
_RETRY_AFTER_S = 1
_PROGRAM = "from nouscoder.verifier.api.parse_worker import main; main()"
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LANG", "LD_LIBRARY_PATH")


class ParsingFailed(QueueFull):
    """The process ended or was silent. The request can be repeated."""

    def __init__(self) -> None:
        super().__init__(_RETRY_AFTER_S)
        self.args = ("the request could not be parsed in time; retry",)


class ParseProcess:
    """The process of parse_worker.py. May be shared between threads."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def parse(self, parse: Callable[[bytes, ValueCount], Any], body: bytes, values: ValueCount) -> Any:
        """What `parse`, a function of a module, makes of the body. It adds to `values` there as it would here.

        Blocks. Raises what `parse` raises, and ParsingFailed.
        """
        name = pickle.dumps(parse)
        with self._lock:
            try:
                with self._connected().makefile("rwb") as stream:
                    stream.write(REQUEST.pack(len(name), len(body), values.weight) + name)
                    stream.write(body)
                    stream.flush()
                    values.weight, num_parts, is_last = ANSWER.unpack(_read(stream, ANSWER.size))
                    ended, *parts = [
                        pickle.loads(_read(stream, SIZE.unpack(_read(stream, SIZE.size))[0])) for _ in range(num_parts)
                    ]
                if is_last:
                    self.close()
            except (OSError, EOFError) as error:
                self.close()
                raise ParsingFailed from error
            except BaseException:
                self.close()  # the rest of the answer must not become the next one
                raise
        match ended:
            case Ended.RAISED:
                raise parts[0]
            case Ended.MANY:
                return parts
            case _:
                return parts[0]

    def close(self) -> None:
        """Kill the process, if there is one, and wait for it."""
        process, self._process = self._process, None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if process is not None:
            process.kill()
            process.wait()

    def _connected(self) -> socket.socket:
        """The socket of a process that lives."""
        if self._socket is None or self._process is None or self._process.poll() is not None:
            self.close()
            self._socket, other = socket.socketpair()
            self._socket.settimeout(self._limit_s)
            with other:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM],
                    stdin=other.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                    start_new_session=True,
                )
        return self._socket


def _read(stream: BufferedRWPair, num_bytes: int) -> bytes:
    """Raises EOFError."""
    data = stream.read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError
    return data
