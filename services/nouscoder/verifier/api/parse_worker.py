"""The process that parses large bodies for the gateway (parse_process.py).

It reads requests from the socket that is its stdin, and ends when the gateway has closed it. All values that a body
holds exist only here: the gateway gets tests as the bytes of a compressed file, and decodes a case when it uses it. So
a call case with more values than the gateway can decode without a stall is refused.

A request is a head (`REQUEST`: size of the function's name, size of the body, weight of the body), then both. An answer
is a head (`ANSWER`: weight of the body with the texts inside it, number of parts, whether the process ends now), then
each part: its size, and a pickle. The first part tells what the others are (`Ended`).
"""

from __future__ import annotations

import contextlib
import copyreg
import gc
import pickle
import resource
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from io import BufferedRWPair
from pathlib import Path
from typing import Any, get_args

from nouscoder.domain.submission import CallTests, Submission, Tests, TestsReference
from nouscoder.formats.json_size import ValueCount, json_weight
from nouscoder.store.case_files import CaseFile, packed, unpacked
from nouscoder.verifier.grading.validation import InvalidSubmission

REQUEST, ANSWER, SIZE = struct.Struct("<IQQ"), struct.Struct("<QI?"), struct.Struct("<Q")
MAX_CASE_WEIGHT = 500_000
_MOST_WEIGHT_OF_A_BYTE = 8
_MEMORY_BYTES = 2 << 30
_KEPT_MEMORY_BYTES = 512 << 20  # a process that took more ends after its answer


class Ended(Enum):
    """How parsing a body ended."""

    ONE = "one"  # the next part is the result
    MANY = "many"  # the result is the list of the parts that follow
    RAISED = "raised"  # the next part is the exception


def main() -> None:
    """Serve until the gateway has closed the socket."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    with contextlib.suppress(OSError):  # where memory runs out, the kernel kills this process and not the gateway
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")
    copyreg.pickle(Submission, _reduced_submission)
    for kind in get_args(Tests):
        copyreg.pickle(kind, _reduced_tests)
    gc.disable()
    with (
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
        socket.socket(fileno=sys.stdin.fileno()) as gateway,
    ):
        stream = gateway.makefile("rwb")
        while len(head := stream.read(REQUEST.size)) == REQUEST.size:
            name_bytes, body_bytes, weight = REQUEST.unpack(head)
            parse = pickle.loads(stream.read(name_bytes))
            if _answer(stream, parse, stream.read(body_bytes), ValueCount(weight)):
                break
            gc.collect()


def _answer(stream: BufferedRWPair, parse: Callable[[bytes, ValueCount], Any], body: bytes, values: ValueCount) -> bool:
    """Answer one request. Returns whether the process ends, because it has taken much memory."""
    try:
        found = parse(body, values)
        parts = [pickle.dumps(one) for one in ([Ended.MANY, *found] if isinstance(found, list) else [Ended.ONE, found])]
    except MemoryError:
        parts = _raised(InvalidSubmission("body", "takes too much memory to parse"))
    except Exception as error:
        error.add_note(f"In the parsing process:\n{traceback.format_exc()}")
        parts = _raised(error)
    is_last = _most_memory_bytes() > _KEPT_MEMORY_BYTES
    stream.write(ANSWER.pack(values.weight, len(parts), is_last))
    for part in parts:
        stream.write(SIZE.pack(len(part)))
        stream.write(part)
    stream.flush()
    return is_last


def _most_memory_bytes() -> int:
    """The largest resident size so far. (ru_maxrss begins with that of the process which started this one.)"""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def _raised(error: Exception) -> list[bytes]:
    return [pickle.dumps(Ended.RAISED), pickle.dumps(error)]


def _reduced_tests(tests: Tests) -> tuple[Callable[[bytes], Tests], tuple[bytes]]:
    return unpacked, (_packed(tests)[0],)


def _reduced_submission(submission: Submission) -> tuple[Callable[..., Submission], tuple[Any, ...]]:
    if isinstance(submission.tests, TestsReference):
        return Submission, tuple(getattr(submission, name) for name in Submission.__match_args__)
    data, digest = _packed(submission.tests)
    return with_tests, (data, replace(submission, tests=TestsReference(digest), tests_digest=digest))


def with_tests(data: bytes, submission: Submission) -> Submission:
    """A submission with the tests of a file in memory."""
    return replace(submission, tests=unpacked(data))


def _packed(tests: Tests) -> tuple[bytes, str]:
    """The file of the tests, and their digest. Raises InvalidSubmission for a call with too many values."""
    data, digest = packed(tests)
    file = CaseFile(data)
    for index in range(file.num_cases if isinstance(tests, CallTests) else 0):
        may_be_heavy = _MOST_WEIGHT_OF_A_BYTE * file.case_bytes(index) > MAX_CASE_WEIGHT
        if may_be_heavy and json_weight(file.case_text(index), MAX_CASE_WEIGHT) > MAX_CASE_WEIGHT:
            raise InvalidSubmission(
                f"tests.cases[{index}]", f"holds too many values: one call may have about {MAX_CASE_WEIGHT:,} integers"
            )
    return data, digest
