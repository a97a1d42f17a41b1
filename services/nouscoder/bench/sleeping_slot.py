"""A slot for `bench verifier --simulate-slots`: it speaks the frames of the harness and sleeps in place of programs.

Started in place of the interpreter of candidates: `python -m nouscoder.bench.sleeping_slot SECONDS ...`. The output of
every run is its input. It executes nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time

from nouscoder.verifier.harness import frames
from nouscoder.verifier.harness.frames import FrameKind


def serve(sleep_s: float, stream_in: int = 0, stream_out: int = 1) -> None:
    """Answer frames until the stream closes. A run takes `sleep_s` seconds."""
    frames.write_frame(stream_out, FrameKind.HELLO, json.dumps({"pid": os.getpid()}).encode())
    frames.write_frame(stream_out, FrameKind.READY)
    while (frame := _next_frame(stream_in)) is not None:
        kind, payload = frame
        match kind:
            case FrameKind.PROGRAM:
                frames.write_frame(stream_out, FrameKind.COMPILED)
            case FrameKind.RUN:
                time.sleep(sleep_s)
                result = frames.Result(frames.RunEnd.EXITED, 0, 0, sleep_s, sleep_s, 1 << 23, payload, b"", None)
                frames.write_frame(stream_out, FrameKind.RESULT, frames.pack_result(result))
            case FrameKind.END:
                frames.write_frame(stream_out, FrameKind.READY)


def _next_frame(fd: int) -> tuple[FrameKind, bytes] | None:
    header = _read(fd, frames.HEADER.size)
    if header is None:
        return None
    number, length = frames.HEADER.unpack(header)
    payload = _read(fd, length)
    return None if payload is None else (FrameKind(number), payload)


def _read(fd: int, num_bytes: int) -> bytes | None:
    """Exactly so many bytes; None when the stream ends before."""
    read = b""
    while len(read) < num_bytes:
        part = os.read(fd, num_bytes - len(read))
        if not part:
            return None
        read += part
    return read


if __name__ == "__main__":
    serve(float(sys.argv[1]))
