"""What a gateway and a slot agree on: the settings of a slot, and length-prefixed frames over one byte stream.

INVARIANT: nothing is read ahead. At the end of a frame, another process of the slot can take over the stream.

The gateway sends for each session: PROGRAM, then any number of RUN, DIALOGUE or DIRECT_DIALOGUE, each optionally after
ARGUMENTS (arguments and files), then END. END may come at any time and ends a run early. The slot sends HELLO or FAILED
once, READY when the next sandbox is ready, COMPILED, COMPILE_FAILED or COMPILE_STARVED after PROGRAM, and RESULT after
RUN. COMPILED has what the compiler said, and what it made if the gateway wants it; FILES follow a RESULT if the program
has files to fetch. In a DIALOGUE the gateway sends INPUT, INPUT_END and HOLD, and the slot sends OUTPUT, until RESULT;
later frames are dropped. OUTPUT_END comes once, when the program has closed its output, and no OUTPUT follows. HOLD
stops all processes of the program until the next INPUT. The slot answers it with HELD, after the rest of the output.
DIRECT_DIALOGUE connects the program with that of its partner's slot by pipes; the only answer is RESULT.

The settings are one JSON object on the command line of a slot, the same for all its candidates. The harness uses
NamedTuple, because importing dataclasses would make every later fork slower by 0.1 ms.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

HEADER = struct.Struct("!BI")  # kind, payload length in bytes
_COUNT, _COUNTS = struct.Struct("=I"), struct.Struct("=II")
_PROGRAM = struct.Struct("=3d4Q12I")
_TERMS = struct.Struct("=d16sB")
NONCE_BYTES = 16
RESULT_FILE = "output"  # in the working directory
JUDGE = "__nouscoder_case__"  # the entry point that a judge's prelude defines, and no program
MAX_FRAME_BYTES = 1 << 30
MAX_SENT_FILES, MAX_SENT_BYTES = 64, 16 << 20  # of one COMPILED or FILES, as in folder.c
_SENT, _NOT_WHOLE = struct.Struct("!I"), 0xFFFFFFFF
_NO_FILES: Mapping[str, bytes] = {}
# exit, exit code, signal, wall s, CPU s, peak memory bytes, the lengths of stdout, stderr and result (-1: none), and
# whether the partner had ended (bit 0) and the program has read something that it said (bit 1), and starved s
_RESULT = struct.Struct("!BiiddQIIiBd")


class FrameKind(IntEnum):
    """The kind of a frame."""

    PROGRAM = 1
    RUN = 2
    END = 3
    ARGUMENTS = 4
    DIALOGUE = 5
    INPUT = 6
    INPUT_END = 7
    HOLD = 8
    DIRECT_DIALOGUE = 9
    HELLO = 16
    READY = 17
    COMPILED = 18
    COMPILE_FAILED = 19
    RESULT = 20
    FAILED = 21
    OUTPUT = 22
    HELD = 23
    OUTPUT_END = 24
    FILES = 25
    COMPILE_STARVED = 26


class RunEnd(IntEnum):
    """How the process tree of a run ended. The gateway maps it to `Exit`."""

    EXITED = 0
    SIGNALLED = 1
    TIME_LIMIT = 2
    MEMORY_LIMIT = 3
    OUTPUT_LIMIT = 4


class Result(NamedTuple):
    """The result of one run, as sent over the stream."""

    ended: int
    exit_code: int
    signal: int
    wall_time_s: float
    cpu_time_s: float
    memory_bytes: int
    stdout: bytes
    stderr: bytes
    result: bytes | None
    partner_ended: bool = False  # of a dialogue: the partner ended first
    has_heard: bool = False  # of a dialogue: the program read something of what its partner said
    starved_s: float = 0.0  # the time in which others kept it from the CPU, which is not in the wall time


class ResultKind(IntEnum):
    """Where the result of a run comes from."""

    NONE = 0
    CALL = 1  # the returned value of the entry point
    FILE = 2  # RESULT_FILE, if the program has made it


class ProgramLimits(NamedTuple):
    """The limits of a program's runs, in the order of `struct program`."""

    compile_time_s: float
    cpu_time_s: float
    wall_time_s: float
    memory_bytes: int
    extra_space_bytes: int  # additional address space for programs that are executed
    output_bytes: int
    processes: int


class StreamClosed(Exception):
    """The peer has closed the stream."""


def encode(kind: FrameKind, payload: bytes = b"") -> bytes:
    """Encode one frame. Raises ValueError when the payload is too long."""
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame holds at most {MAX_FRAME_BYTES} bytes, not {len(payload)}")
    return HEADER.pack(kind, len(payload)) + payload


def pack_result(r: Result) -> bytes:
    """The payload of a RESULT frame."""
    num_result = -1 if r.result is None else len(r.result)
    head = _RESULT.pack(
        *r[:6], len(r.stdout), len(r.stderr), num_result, r.partner_ended | r.has_heard << 1, r.starved_s
    )
    return b"".join((head, r.stdout, r.stderr, r.result or b""))


def unpack_result(payload: bytes) -> Result:
    """Inverse of `pack_result`. Raises ValueError for an invalid payload, which a taken-over runner may send."""
    if len(payload) < _RESULT.size:
        raise ValueError("short RESULT frame")
    ended, code, signal, wall, cpu, memory, num_out, num_err, num_result, partner, starved = _RESULT.unpack_from(
        payload
    )
    out_end = _RESULT.size + num_out
    err_end = out_end + num_err
    if num_result < -1 or len(payload) != err_end + max(num_result, 0):
        raise ValueError("RESULT frame of the wrong length")
    if not (
        all(0 <= one < math.inf for one in (wall, cpu, starved))
        and 0 <= code <= 255
        and 0 <= signal <= 64
        and partner <= 3
    ):
        raise ValueError("RESULT frame with impossible numbers")
    RunEnd(ended)
    result = payload[err_end:] if num_result >= 0 else None
    return Result(
        *(ended, code, signal, wall, cpu, memory),
        *(
            payload[_RESULT.size : out_end],
            payload[out_end:err_end],
            result,
            bool(partner & 1),
            bool(partner & 2),
            starved,
        ),
    )


def session_bound(output_bytes: int, *, has_files: bool = False) -> int:
    """The length [bytes] that no frame of a session exceeds: a RESULT with all of its output, stderr and value.

    `has_files`: the slot may also send files, because the gateway fetches them or keeps what a compiler makes.
    """
    return max(_RESULT.size + 2 * output_bytes, MAX_SENT_BYTES if has_files else 0) + (1 << 18)


def unpack_files(payload: bytes) -> tuple[bytes, Mapping[str, bytes] | None]:
    """Text and files of a COMPILED or FILES frame; None for files that are not all there. Raises ValueError."""
    at = 0

    def take(length: int) -> bytes:
        nonlocal at
        if length > len(payload) - at:
            raise ValueError("a frame of files is shorter than its lengths")
        at += length
        return payload[at - length : at]

    def take_number() -> int:
        return int(_SENT.unpack(take(_SENT.size))[0])

    text, num_files = take(take_number()), take_number()
    if num_files == _NOT_WHOLE:
        return text, None
    if num_files > MAX_SENT_FILES:
        raise ValueError("a frame of too many files")
    files = {}
    for _ in range(num_files):
        name = take(take_number()).decode("utf-8", "surrogateescape")
        files[name] = take(take_number())
    if at != len(payload) or any("/" in name or "\0" in name or name in ("", ".", "..") for name in files):
        raise ValueError("a frame of files with impossible names or bytes after them")
    return text, files


def pack_program(
    source: bytes,
    *,
    entry_point: str = "",
    prelude: str = "",
    source_name: str,
    limits: ProgramLimits,
    compile_argv: Sequence[str] | None = None,
    run_argv: Sequence[str] | None = None,
    files: Mapping[str, bytes] = _NO_FILES,
    made: Mapping[str, bytes] = _NO_FILES,
    makes_file: bool = False,
    fetch: Sequence[str] = (),
    wants_program: bool = False,
) -> bytes:
    """The payload of a PROGRAM frame: `struct program` of init.h and the texts after it. Python has no `run_argv`.

    `files` are beside the source when it is compiled and in every run. `made` are what a compiler made before, in a
    folder of their own. `fetch` names files that each RUN answers with;
    with `wants_program` COMPILED has what the compiler made. With `makes_file` the result of a run is the
    file RESULT_FILE.
    """
    kind = ResultKind.CALL if entry_point else ResultKind.FILE if makes_file else ResultKind.NONE
    meta = f"{entry_point}\0{prelude}".encode("utf-8", "surrogatepass")
    name = source_name.encode()
    compiling, running = compile_argv or (), run_argv or ()
    head = _PROGRAM.pack(
        *limits,
        kind,
        run_argv is not None,
        compile_argv is not None,
        len(meta),
        len(name),
        len(source),
        len(compiling),
        len(running),
        len(files) + len(made),
        len(fetch),
        wants_program,
        len(made),
    )
    words = _strings(compiling), _strings(running)
    return b"".join((head, meta, name, b"\0", source, *words, *_files(files), *_files(made), _strings(fetch)))


def pack_arguments(args: Sequence[str], files: Mapping[str, bytes]) -> bytes:
    """The payload of an ARGUMENTS frame: NUL-terminated arguments, then the name and the contents of each file."""
    strings = _strings(args)
    return b"".join((_COUNTS.pack(len(args), len(strings)), strings, _COUNT.pack(len(files)), *_files(files)))


def _files(files: Mapping[str, bytes]) -> Iterator[bytes]:
    """The parts of the name and the contents of each file."""
    for name, content in files.items():
        encoded = name.encode("utf-8", "surrogatepass") + b"\0"
        yield from (_COUNT.pack(len(encoded)), encoded, _COUNT.pack(len(content)), content)


def pack_terms(nonce: bytes, *, is_host: bool, spare_s: float) -> bytes:
    """The payload of a DIRECT_DIALOGUE frame: `struct terms` of dialogue.c. Both slots get the same nonce.

    The program is not charged for up to `spare_s` seconds in which it waits for its partner.
    """
    return _TERMS.pack(spare_s, nonce, not is_host)


def _strings(words: Sequence[str]) -> bytes:
    return b"".join(word.encode("utf-8", "surrogateescape") + b"\0" for word in words)


def write_frame(fd: int, kind: FrameKind, payload: bytes = b"") -> None:
    """Write one whole frame. Raises StreamClosed when the peer has closed the stream."""
    view = memoryview(encode(kind, payload))
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError as error:
        raise StreamClosed from error


class SlotSettings(NamedTuple):
    """`uid_init` and `uid_candidate` are host user ids, or None to map a single user (the service is not root)."""

    site_packages: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    read_only: tuple[str, ...] = ()  # further folders of the host that candidates see at the same paths
    tmp_bytes: int = 256 * 1024**2
    tmp_inodes: int = 16384  # the kernel frees so many in a tenth of a second
    stack_bytes: int = 256 * 1024**2
    uid_init: int | None = None
    uid_candidate: int | None = None
    init_library: str = ""  # path of the compiled init (init/)
    peer: int = -1  # a descriptor: the socket to the slot of the partner
    groups: tuple[str, ...] = ()  # the files cgroup.procs of the control groups that the harness joins
    kernel: str = "linux"  # the kernel below the slot: "linux" or "gvisor"

    def to_json(self) -> str:
        """The settings as JSON for the command line."""
        return json.dumps(self._asdict())

    @staticmethod
    def from_json(text: str) -> SlotSettings:
        """Inverse of `to_json`. Raises TypeError for unknown keys."""
        values = json.loads(text)
        return SlotSettings(**(values | {key: tuple(one) for key, one in values.items() if isinstance(one, list)}))
