"""The file of one set of tests: compressed, readable case by case, named by its content.

Layout: zstd frames, then one index. The frames decompress to the canonical JSON (formats/body.py), so
`zstd -dc FILE | sha256sum` prints the digest. Frame 0 is the text before the first case. Each further frame holds about
64 KiB of whole cases.

INVARIANT: reading a case decompresses only its frame. Damaged bytes are never returned: each frame and the index have a
checksum, and `check` compares the whole text with the digest.

The index says where frames and cases are. It is a skippable zstd frame, little-endian:

    uint32 num_frames, num_cases; then per frame uint64 end in the file, uint64 end in the text;
    then per case uint64 end in the text, uint32 size of its input; then uint32 CRC-32 of the index up to here;
    then uint32 size of the index up to here; then b"NCT1", the last four bytes of the file
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import threading
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO, Generic, Self, TypeVar, overload

import zstandard
from pydantic_core import from_json

from nouscoder.domain.submission import (
    AssertTests,
    CallCase,
    CallTests,
    CheckerTests,
    InteractiveTests,
    JudgeProgram,
    JudgeProtocol,
    MathCase,
    MathTests,
    StdinCase,
    StdinTests,
    Tests,
    input_size,
)
from nouscoder.errors import ExitCode, NousCoderError
from nouscoder.formats.body import canonical_parts
from nouscoder.formats.json_values import LONG_BYTES, give_way, without_collections

_MAGIC = b"NCT1"
_SKIPPABLE = 0x184D2A50


class CaseIndex:
    """Where the frames and cases are."""

    def __init__(self) -> None:
        self.frame_ends: list[tuple[int, int]] = []  # in the file, in the text
        self.cases: list[tuple[int, int]] = []  # end in the text, size of the input

    def pack(self) -> bytes:
        """The skippable frame that ends the file."""
        body = struct.pack("<II", len(self.frame_ends), len(self.cases))
        body += b"".join(struct.pack("<QQ", *ends) for ends in self.frame_ends)
        body += b"".join(struct.pack("<QI", end, min(size, 2**32 - 1)) for end, size in self.cases)
        body += struct.pack("<I", zlib.crc32(body))
        payload = body + struct.pack("<I", len(body)) + _MAGIC
        return struct.pack("<II", _SKIPPABLE, len(payload)) + payload

    @classmethod
    def read(cls, read_at: Callable[[int, int], bytes], num_bytes: int) -> CaseIndex:
        """The index of a file of `num_bytes`. `read_at` returns a number of bytes from a place in the file.

        Raises ValueError when the index is missing or damaged.
        """
        tail = read_at(8, max(0, num_bytes - 8))
        if tail[4:] != _MAGIC:
            raise ValueError("it has no index")
        (size,) = struct.unpack("<I", tail[:4])
        body = read_at(size, max(0, num_bytes - 8 - size))
        if len(body) != size or size < 12 or struct.unpack("<I", body[-4:])[0] != zlib.crc32(body[:-4]):
            raise ValueError("its index is broken")
        num_frames, num_cases = struct.unpack_from("<II", body)
        index = cls()
        index.frame_ends = list(struct.iter_unpack("<QQ", body[8 : 8 + 16 * num_frames]))
        index.cases = list(struct.iter_unpack("<QI", body[8 + 16 * num_frames : -4]))
        if len(index.cases) != num_cases or num_frames < 1:
            raise ValueError("its index is broken")
        return index


Case = TypeVar("Case")

_RECENT_CASES = 8
_RECENT_BYTES = 1 << 20  # of the text of a call that is kept in memory


class CaseFileBroken(NousCoderError):
    """A file of tests is damaged; the message names it."""

    exit_code = ExitCode.DAMAGED


class StoredCases(Sequence[Case], Generic[Case]):
    """The cases of a file, each read when it is used. The last few are kept in memory, except large ones."""

    def __init__(self, file: CaseFile, decode: Callable[[Any], Case]) -> None:
        self._file = file
        self._decode = decode
        self._recent: OrderedDict[int, Case] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def input_sizes(self) -> Sequence[int]:
        """The size of each case's input, without reading the cases."""
        return self._file.input_sizes

    def text_bytes(self, index: int) -> int:
        """The size of a case as JSON, without reading it."""
        return self._file.case_bytes(index)

    def __len__(self) -> int:
        return self._file.num_cases

    @overload
    def __getitem__(self, index: int) -> Case: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Case]: ...
    def __getitem__(self, index: int | slice) -> Case | Sequence[Case]:
        """Raises CaseFileBroken."""
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        with self._lock:  # tests of one submission are judged in several threads
            case = self._recent.get(at)
            if case is None:
                case = self._read(at)
        return case

    def _read(self, at: int) -> Case:
        try:
            case = self._decode(self._file.case(at))
        except (TypeError, KeyError) as error:
            raise CaseFileBroken(f"case {at} is not a case: {type(error).__name__}: {error}") from None
        if isinstance(case, CallCase) and self._file.case_bytes(at) > _RECENT_BYTES:
            return case  # the values of several would be a million objects for the garbage collector
        self._recent[at] = case
        if len(self._recent) > _RECENT_CASES:
            self._recent.popitem(last=False)
        return case


def tests_of(head: dict[str, Any], file: CaseFile) -> Tests:
    """The tests of a file, whose fields before the cases are `head`. Raises ValueError, KeyError and TypeError."""
    match head["type"]:
        case StdinTests.type:
            return StdinTests(StoredCases(file, _stdin))
        case CallTests.type:
            setup, wrapped = head.get("setup", ""), head.get("wrapped") is True
            return CallTests(head["entry_point"], StoredCases(file, _call), setup, wrapped)
        case AssertTests.type:
            return AssertTests(StoredCases(file, str), head["setup"], head.get("module", ""))
        case CheckerTests.type:
            runner = _judge(head["runner"]) if "runner" in head else None
            return CheckerTests(StoredCases(file, _stdin), _judge(head["checker"]), head.get("of_code") is True, runner)
        case InteractiveTests.type:
            checker = _judge(head["checker"]) if "checker" in head else None
            unbuffered = head.get("unbuffered") is True
            return InteractiveTests(StoredCases(file, _stdin), _judge(head["interactor"]), unbuffered, checker)
        case MathTests.type:
            return MathTests(StoredCases(file, lambda record: MathCase(**record)))
        case other:
            raise ValueError(f"{other!r:.40} is no type of tests")


def _judge(record: dict[str, str]) -> JudgeProgram:
    protocol = JudgeProtocol(record.get("protocol", JudgeProtocol.TESTLIB))
    return JudgeProgram(record["code"], record["language"], protocol)


def _stdin(record: Any) -> StdinCase:
    return StdinCase(record["input"], record["output"], tuple(record.get("args", ())))


def _call(record: Any) -> CallCase:
    return CallCase(tuple(record["args"]), record["kwargs"], record["expected"])


FRAME_BYTES = 64 * 1024
# For frames of this size level 3 takes twice the time of level 1 and makes them no smaller. Level 1 looks for repeats
# of 6 bytes; with 7 it takes two thirds of its time on lists of numbers, and the frames grow by 0 to 6 %.
_LEVEL, _SHORTEST_REPEAT = 1, 7


class _OfThread(threading.local):
    """What packs and unpacks the frames, one for each thread, because making it costs more than a small frame."""

    def __init__(self) -> None:
        how = zstandard.ZstdCompressionParameters(
            compression_level=_LEVEL, min_match=_SHORTEST_REPEAT, write_checksum=True, write_content_size=True
        )
        self.packer = zstandard.ZstdCompressor(compression_params=how)
        self.unpacker = zstandard.ZstdDecompressor()


_of_thread = _OfThread()


def write_tests(tests: Tests, file: BinaryIO) -> tuple[str, int]:
    """Write `tests`; returns their digest and the size of their text in bytes. Raises as `canonical_parts` does."""
    packer = _of_thread.packer
    digest, index = hashlib.sha256(), CaseIndex()
    at, text_bytes, frame = 0, 0, bytearray()

    def end_frame() -> None:
        nonlocal at
        if frame:
            digest.update(frame)
            at += file.write(packer.compress(frame))
            index.frame_ends.append((at, text_bytes))
            frame.clear()

    num_cases = len(tests.cases)
    for number, part in enumerate(canonical_parts(tests)):
        frame += part
        text_bytes += len(part)
        give_way(len(part))
        if 0 < number <= num_cases:
            index.cases.append((text_bytes, input_size(tests.cases[number - 1])))
        if number == 0 or len(frame) >= FRAME_BYTES:
            end_frame()
    end_frame()
    file.write(index.pack())
    return f"sha256:{digest.hexdigest()}", text_bytes


def packed(tests: Tests) -> tuple[bytes, str]:
    """The file of `tests` in memory, and their digest. Raises as `canonical_parts` does."""
    file = io.BytesIO()
    digest, _ = write_tests(tests, file)
    return file.getvalue(), digest


def unpacked(data: bytes) -> Tests:
    """The tests of a file in memory; each case is decoded when it is used. Raises CaseFileBroken."""
    return CaseFile(data).tests()


class _OpenFile:
    """The bytes of a file on disk."""

    def __init__(self, path: Path, *, is_own: bool) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_NOFOLLOW if is_own else 0))
        found = os.fstat(self._file)
        self.num_bytes = found.st_size
        if is_own and found.st_uid != os.geteuid():
            self.close()
            raise CaseFileBroken(f"{path} was written by user {found.st_uid}")

    def read_at(self, num_bytes: int, at: int) -> bytes:
        return os.pread(self._file, num_bytes, at)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _InMemory:
    """The bytes of a file that is not on disk."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.num_bytes = len(data)

    def read_at(self, num_bytes: int, at: int) -> bytes:
        return self._data[at : at + num_bytes]

    def close(self) -> None:
        pass


class CaseFile:
    """An open file of tests. Use as a context manager, or close it, unless it is in memory."""

    def __init__(self, source: Path | bytes, *, is_own: bool = False) -> None:
        """Open a file, or the bytes of one. With `is_own` a link or another user's file is broken.

        Raises OSError, and CaseFileBroken.
        """
        self._path = source if isinstance(source, Path) else Path("memory")
        self._file = _OpenFile(source, is_own=is_own) if isinstance(source, Path) else _InMemory(source)
        try:
            self._index = CaseIndex.read(self._file.read_at, self._file.num_bytes)
        except ValueError as error:
            self._file.close()
            raise CaseFileBroken(f"{self._path}: {error}") from None
        # The size of each case's input [num_cases], see `domain.submission.input_size`.
        self.input_sizes: Sequence[int] = [size for _, size in self._index.cases]
        self._frame: tuple[int, bytes] = (-1, b"")  # the one that was read last

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def num_cases(self) -> int:
        """How many cases there are."""
        return len(self._index.cases)

    @property
    def num_bytes(self) -> int:
        """Size of the text."""
        return self._index.frame_ends[-1][1]

    def check(self, digest: str) -> None:
        """Read the whole file. Raises CaseFileBroken unless its text has this digest."""
        found = hashlib.sha256()
        for number in range(len(self._index.frame_ends)):
            found.update(self._read_frame(number))
        if digest != f"sha256:{found.hexdigest()}":
            raise CaseFileBroken(f"{self._path} does not hold the tests {digest}")

    def case_bytes(self, index: int) -> int:
        """Size of the text of one case."""
        begin, end = self._place(index)
        return end - begin

    def _place(self, index: int) -> tuple[int, int]:
        """The begin and the end of a case in the text."""
        begin = self._index.cases[index - 1][0] if index else self._index.frame_ends[0][1]
        return begin, self._index.cases[index][0]

    def case(self, index: int) -> Any:
        """One case as a JSON value. Raises CaseFileBroken."""
        begin, end = self._place(index)
        frame_ends = self._index.frame_ends
        number = bisect_right(frame_ends, begin, hi=len(frame_ends) - 1, key=lambda ends: ends[1])
        frame, first = self._read_frame(number), frame_ends[number - 1][1]
        text = frame[begin - first : end - first].removeprefix(b",")
        give_way(len(text))
        try:
            with without_collections() if len(text) > LONG_BYTES else nullcontext():
                return from_json(text)
        except ValueError as error:
            raise CaseFileBroken(f"{self._path}, case {index}: {error}") from None

    def tests(self) -> Tests:
        """The tests; each case is read from the file when it is used. Raises CaseFileBroken."""
        try:
            head = from_json(self._read_frame(0) + b"]}")
            return tests_of(head, self)
        except (ValueError, KeyError, TypeError) as error:
            raise CaseFileBroken(f"{self._path}: {type(error).__name__}: {error}") from None

    def _read_frame(self, number: int) -> bytes:
        last, text = self._frame
        if last != number:
            begin, text_begin = self._index.frame_ends[number - 1] if number else (0, 0)
            end, text_end = self._index.frame_ends[number]
            compressed = self._file.read_at(end - begin, begin)
            try:
                text = _of_thread.unpacker.decompress(compressed, max_output_size=text_end - text_begin)
            except zstandard.ZstdError as error:
                raise CaseFileBroken(f"{self._path}, frame {number}: {error}") from None
            if len(text) != text_end - text_begin:
                raise CaseFileBroken(f"{self._path}, frame {number}: it has another length than its index says")
            self._frame = (number, text)
        return text
