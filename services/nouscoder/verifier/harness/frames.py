"""The one byte stream between the gateway and a slot: length-prefixed frames, no descriptor passing.

INVARIANT: nothing is read ahead, so at a frame's end the stream can be handed from one process of the slot to another.

A session is PROGRAM, then any number of RUN or TALK, each perhaps after a GIVEN (arguments and files), then END (END
may come at any time and cuts a run short). The slot says HELLO or FAILED once, READY when the next sandbox stands,
COMPILED or COMPILE_FAILED after PROGRAM, RESULT after RUN. In a TALK, INPUT and INPUT_END go in and OUTPUT comes out
until RESULT; input that comes later is dropped.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

HEADER = struct.Struct("!BI")  # kind, payload length in bytes
_LENGTH = struct.Struct("!I")
MAX_FRAME_BYTES = 1 << 30
# exit, exit code, signal, wall s, CPU s, peak memory bytes, then the lengths of stdout, stderr and result (-1: none)
_RESULT = struct.Struct("!BiiddQIIi")


class Kind(IntEnum):
    """What a frame is."""

    PROGRAM = 1
    RUN = 2
    END = 3
    GIVEN = 4
    TALK = 5
    INPUT = 6
    INPUT_END = 7
    HELLO = 16
    READY = 17
    COMPILED = 18
    COMPILE_FAILED = 19
    RESULT = 20
    FAILED = 21
    OUTPUT = 22


class Ended(IntEnum):
    """How a run's process tree ended; the gateway's `Exit`, by number."""

    EXITED = 0
    SIGNALLED = 1
    TIME_LIMIT = 2
    MEMORY_LIMIT = 3
    OUTPUT_LIMIT = 4


class Result(NamedTuple):
    """One run as it crosses the stream."""

    ended: int
    exit_code: int
    signal: int
    wall_time_s: float
    cpu_time_s: float
    memory_bytes: int
    stdout: bytes
    stderr: bytes
    result: bytes | None


class Given(NamedTuple):
    """What one run finds beside its input: arguments after its name, read-only files in its folder."""

    args: tuple[str, ...] = ()
    files: tuple[tuple[str, bytes], ...] = ()


class StreamClosed(Exception):
    """The other side is gone."""


def encode(kind: Kind, payload: bytes = b"") -> bytes:
    """One frame. Raises ValueError when the payload is too long for one."""
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame carries at most {MAX_FRAME_BYTES} bytes, not {len(payload)}")
    return HEADER.pack(kind, len(payload)) + payload


def pack_result(r: Result) -> bytes:
    """The payload of a RESULT frame."""
    num_result = -1 if r.result is None else len(r.result)
    head = _RESULT.pack(*r[:6], len(r.stdout), len(r.stderr), num_result)
    return b"".join((head, r.stdout, r.stderr, r.result or b""))


def unpack_result(payload: bytes) -> Result:
    """Inverse of `pack_result`. Raises ValueError on a payload that is not one."""
    if len(payload) < _RESULT.size:
        raise ValueError("short RESULT frame")
    ended, code, signal, wall, cpu, memory, num_out, num_err, num_result = _RESULT.unpack_from(payload)
    out_end = _RESULT.size + num_out
    err_end = out_end + num_err
    if num_result < -1 or len(payload) != err_end + max(num_result, 0):
        raise ValueError("RESULT frame of the wrong length")
    result = payload[err_end:] if num_result >= 0 else None
    return Result(
        ended, code, signal, wall, cpu, memory, payload[_RESULT.size : out_end], payload[out_end:err_end], result
    )


def pack_given(args: tuple[str, ...], files: Mapping[str, bytes]) -> bytes:
    """The payload of a GIVEN frame: a length, a JSON head of that length, then the files' contents."""
    head = json.dumps({"args": args, "files": [[name, len(content)] for name, content in files.items()]}).encode()
    return b"".join((_LENGTH.pack(len(head)), head, *files.values()))


def unpack_given(payload: bytes) -> Given:
    """Inverse of `pack_given`."""
    (head_bytes,) = _LENGTH.unpack_from(payload)
    offset = _LENGTH.size + head_bytes
    head = json.loads(payload[_LENGTH.size : offset])
    files = []
    for name, num_bytes in head["files"]:
        files.append((name, payload[offset : offset + num_bytes]))
        offset += num_bytes
    return Given(tuple(head["args"]), tuple(files))


def read_frame(fd: int) -> tuple[Kind, bytes]:
    """Block for the next frame. Raises StreamClosed at end of stream."""
    kind, length = HEADER.unpack(_read_exactly(fd, HEADER.size))
    return Kind(kind), _read_exactly(fd, length)


def write_frame(fd: int, kind: Kind, payload: bytes = b"") -> None:
    """Write one whole frame. Raises StreamClosed when nobody reads any more."""
    view = memoryview(encode(kind, payload))
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError as error:
        raise StreamClosed from error


def _read_exactly(fd: int, num_bytes: int) -> bytes:
    chunks: list[bytes] = []
    while num_bytes:
        chunk = os.read(fd, min(num_bytes, 1 << 20))
        if not chunk:
            raise StreamClosed
        chunks.append(chunk)
        num_bytes -= len(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
