"""Reads files that strangers made: compressed files, JSON records, packages in folders or zip archives, and YAML.

INVARIANT: what a file says of itself is not believed. In memory are at most MAX_LINE_BYTES of a line, one record of a
file, one piece of it, and MAX_PACKAGE_BYTES of a package. Nothing outside a package is read, and nothing is unpacked to
the disk.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import stat
import sys
import zipfile
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_left
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from pydantic import ValidationError

from nouscoder.errors import Unusable, why_unreadable
from nouscoder.formats.body import Body, first_fault
from nouscoder.formats.json_values import RepeatedKey, json_value, json_weight
from nouscoder.input_file import regular

AnyBody = TypeVar("AnyBody", bound=Body)

MAX_LINE_BYTES = 512 * 1024**2  # the largest rows of public data sets have about 150 MB
MAX_PACKAGE_BYTES = 1024**3
MAX_PACKAGE_FILES = 100_000
MAX_YAML_BYTES = 256 * 1024
MAX_YAML_NODES = 100_000  # with each alias counted as what it stands for

STDIN = Path("-")
_BUFFER_BYTES = 1024**2


class FileRefused(ValueError):
    """A file is damaged or goes beyond a limit. The message says what is wrong, and names a file inside a package."""


class FileTooLarge(FileRefused):
    """A file goes beyond a limit."""


# Files that may be compressed are read by their first bytes, and written by their name.


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """The bytes of a file (`-`: stdin), decompressed, without UTF-8's mark. Raises OSError, also for a broken one."""
    import zstandard

    try:
        with ExitStack() as stack:
            file = sys.stdin.buffer if path == STDIN else stack.enter_context(regular(path).open("rb", _BUFFER_BYTES))
            head = cast("io.BufferedReader", file).peek(4)[:4]
            if head[:2] == b"\x1f\x8b":
                file = cast("IO[bytes]", stack.enter_context(gzip.open(file)))
            elif head == b"\x28\xb5\x2f\xfd":
                file = stack.enter_context(zstandard.open(file, "rb"))
            else:
                yield _without_mark(cast("io.BufferedReader", file))
                return
            yield _without_mark(io.BufferedReader(cast("io.RawIOBase", file), _BUFFER_BYTES))
    except (EOFError, zlib.error, zstandard.ZstdError) as error:
        raise OSError(f"it is not a complete compressed file: {error}") from error


def _without_mark(file: io.BufferedReader) -> io.BufferedReader:
    """The file after the mark of UTF-8 that some programs write first. Raises OSError for that of UTF-16 or UTF-32."""
    head = file.peek(len(BOM_UTF8))
    if head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise OSError("it is UTF-16 or UTF-32: save it as UTF-8")
    if head.startswith(BOM_UTF8):
        file.read(len(BOM_UTF8))
    return file


@contextmanager
def created(path: Path, name: str) -> Iterator[IO[bytes]]:
    """A new file, compressed as the ending of `name` says. Raises OSError."""
    if name.endswith(".gz"):
        with gzip.open(path, "wb") as packed:
            yield cast("IO[bytes]", packed)
    elif name.endswith(".zst"):
        import zstandard

        with zstandard.open(path, "wb") as packed_frames:
            yield packed_frames
    else:
        with path.open("wb") as plain:
            yield plain


def bounded_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file. Raises FileRefused for one that is too long."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise FileRefused(f"line {number} is longer than {MAX_LINE_BYTES // 1024**2} MiB")
        yield line


def unpacked(data: bytes, most: int) -> bytes:
    """What zlib packed, at most `most` bytes. Raises FileRefused."""
    unpacker = zlib.decompressobj()
    try:
        found = unpacker.decompress(data, most)
    except zlib.error as error:
        raise FileRefused(f"it is not packed by zlib: {error}") from None
    if unpacker.unconsumed_tail:
        raise FileTooLarge(f"it is larger than {most} bytes")
    if not unpacker.eof:
        raise FileRefused("it is cut off")
    return found


# JSON records, one at a time: JSON lines, or one array, plain or compressed (.gz, .zst).

_PIECE = 1024**2
_LIGHT_BYTES = 8 * 1024**2  # the values of a text so long take at most 200 MiB
_MAX_WEIGHT = 40_000_000  # of one record: about 2 GB
_NEXT_ITEM = re.compile(r"[ \t\r\n,]*")


class UnreadableFile(Unusable):
    """A file cannot be read as a whole. The message names it."""


class BadRecord(Unusable):
    """A record of a file does not have the expected form. The message names the file, the record and the field."""


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A value of a file. `number` is its line, or its place in the file, counted from 1. `fault`: it cannot be read."""

    number: int
    value: Any
    fault: str = ""


def read_records(path: Path) -> Iterator[SourceRow]:
    """The records of a file; `-` is standard input. A line that is not JSON is a record with a fault.

    A file whose first character is [ holds one array. Raises UnreadableFile, also for a fault inside an array.
    """
    try:
        with opened(path) as file:
            head = file.peek(_PIECE)
            if head.lstrip()[:1] == b"[" and not _is_line_of_arrays(head):
                yield from _array(path, io.TextIOWrapper(file, "utf8"))
            else:
                yield from _lines(file)
    except (OSError, UnicodeDecodeError, FileRefused) as error:
        raise UnreadableFile(f"{path} cannot be read: {why_unreadable(error)}") from error


def checked_records(path: Path, form: type[AnyBody]) -> Iterator[AnyBody]:
    """The records of a file, each of this form. Raises BadRecord for the first bad record, and UnreadableFile."""
    for record in read_records(path):
        if record.fault:
            raise BadRecord(f"{path}, record {record.number}: {record.fault}")
        yield checked(form, record.value, f"{path}, record {record.number}")


def checked(form: type[AnyBody], value: Any, place: str) -> AnyBody:
    """The value in this form. Raises BadRecord, which names the place."""
    try:
        return form.model_validate(value)
    except ValidationError as error:
        field, fault = first_fault(error)
        raise BadRecord(f"{place}: {fault if field == 'body' else f'{field}: {fault}'}") from None


def bounded_json(text: bytes | str) -> Any:
    """The value of a JSON text, in which no object has a key twice.

    Raises ValueError, which is RepeatedKey, or FileRefused for one with too many values for the memory.
    """
    _check_weight(text)
    return json_value(text)


def _check_weight(text: bytes | str) -> None:
    if json_weight(text, _MAX_WEIGHT) > _MAX_WEIGHT:
        raise FileRefused("a record holds too many values")


def _is_line_of_arrays(head: bytes) -> bool:
    """Whether the first line is a whole array and another line follows: JSON lines, not one array."""
    first, newline, rest = head.partition(b"\n")
    if not newline or not rest.strip():
        return False
    try:
        json_value(first)
    except ValueError:
        return False
    return True


def _lines(file: IO[bytes]) -> Iterator[SourceRow]:
    for number, line in enumerate(bounded_lines(file), 1):
        if not line.strip():
            continue
        try:
            yield SourceRow(number, bounded_json(line))
        except (FileRefused, RepeatedKey) as error:
            yield SourceRow(number, None, str(error))
        except ValueError as error:
            yield SourceRow(number, None, f"not JSON: {error}")


def _array(path: Path, file: IO[str]) -> Iterator[SourceRow]:
    """The items of an array. A piece is read when the text so far does not end an item."""
    decoder = json.JSONDecoder()
    text, at, number, piece = file.read(_PIECE).lstrip(), 1, 0, _PIECE
    while True:
        at = _NEXT_ITEM.match(text, at).end()  # type: ignore[union-attr]  # it matches the empty text too
        if text.startswith("]", at):
            return
        try:
            value, end = decoder.raw_decode(text, at)
            if end == len(text):  # a number may go on in the next piece
                raise ValueError("the text ends here")
        except (ValueError, RecursionError) as error:
            if len(text) - at > MAX_LINE_BYTES:
                raise FileRefused(f"entry {number + 1} is longer than {MAX_LINE_BYTES // 1024**2} MiB") from None
            more = file.read(piece)
            if not more:
                raise UnreadableFile(f"{path}, entry {number + 1}: not JSON: {why_unreadable(error)}") from None
            text, at = text[at:] + more, 0
            if len(text) > _LIGHT_BYTES:
                try:
                    _check_weight(text)
                except RepeatedKey as error:
                    raise FileRefused(f"at entry {number + 1} or behind it: {error}") from None
            piece = min(2 * piece, MAX_LINE_BYTES)  # so that a long item is not scanned for each piece
            continue
        item, number, piece, at = text[at:end], number + 1, _PIECE, end
        try:
            _check_weight(item)
            yield SourceRow(number, value)
        except RepeatedKey as error:
            yield SourceRow(number, None, str(error))


# Packages: folders of files, also in a zip archive.


class PackageFiles(ABC):
    """The files of a package by their paths in it, such as data/secret/1.in. Each call raises FileRefused.

    A package with a file that cannot be taken as it is, such as a link out of it, is refused whole.
    """

    def __init__(self) -> None:
        self._left = MAX_PACKAGE_BYTES

    @cached_property
    def names(self) -> list[str]:
        """The paths of all files, sorted."""
        found: list[str] = []
        for name in self._found():
            if len(found) == MAX_PACKAGE_FILES:
                raise FileRefused(f"there are more than {MAX_PACKAGE_FILES:,} files")
            found.append(name)
        return sorted(found)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def under(self, folder: str, *suffixes: str) -> list[str]:
        """The files in a folder and its folders with one of these endings."""
        first, end = (bisect_left(self.names, f"{folder}{sign}") for sign in "/0")  # 0 comes after /
        return [name for name in self.names[first:end] if name.endswith(suffixes)]

    def text(self, name: str) -> str:
        """The text of a file. Its lines end with a newline character alone."""
        try:
            return self.data(name).decode().replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError:
            raise FileRefused(f"{name} is not UTF-8") from None

    def data(self, name: str) -> bytes:
        """The bytes of a file."""
        if name not in self:
            raise FileRefused(f"there is no {name}")
        data = self._read(name, self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise FileRefused(f"the files are larger than {MAX_PACKAGE_BYTES // 1024**2} MiB")
        return data

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.names)

    @abstractmethod
    def _found(self) -> Iterator[str]: ...

    @abstractmethod
    def _read(self, name: str, most: int) -> bytes: ...


class _Folder(PackageFiles):
    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def _found(self) -> Iterator[str]:
        if self._root.is_symlink():
            raise FileRefused("the package is a link")
        for folder, subfolders, files in os.walk(self._root):
            for name in subfolders:
                if Path(folder, name).is_symlink():
                    raise FileRefused(f"{self._name(folder, name)} is a link to a folder")
            for name in files:
                self._check(Path(folder, name), self._name(folder, name))
                yield self._name(folder, name)

    def _name(self, folder: str, name: str) -> str:
        return Path(folder, name).relative_to(self._root).as_posix()

    def _check(self, file: Path, name: str) -> None:
        try:
            if not file.resolve().is_relative_to(self._root.resolve()):
                raise FileRefused(f"{name} is a link out of the package")
            if not stat.S_ISREG(file.stat().st_mode):
                raise FileRefused(f"{name} is not a regular file")
        except (OSError, RuntimeError) as error:
            raise FileRefused(f"{name} cannot be read: {error}") from None

    def _read(self, name: str, most: int) -> bytes:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            with os.fdopen(os.open((self._root / name).resolve(), flags), "rb") as file:
                return file.read(most)
        except OSError as error:
            raise FileRefused(f"{name} cannot be read: {error.strerror}") from None


class _Zipped(PackageFiles):
    def __init__(self, packed: zipfile.ZipFile, prefix: str, inside: Sequence[zipfile.ZipInfo]) -> None:
        super().__init__()
        self._packed, self._prefix, self._inside = packed, prefix, inside

    def _found(self) -> Iterator[str]:
        for info in self._inside:
            if info.is_dir():
                continue
            name = info.filename.removeprefix(self._prefix)
            if name.startswith("/") or ".." in name.split("/"):
                raise FileRefused(f"{name} is a path out of the package")
            if info.flag_bits & 1:
                raise FileRefused(f"{name} is encrypted")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise FileRefused(f"{name} is compressed by another method than deflate")
            if stat.S_ISLNK(info.external_attr >> 16):
                raise FileRefused(f"{name} is a link")
            yield name

    def _read(self, name: str, most: int) -> bytes:
        try:
            with self._packed.open(self._prefix + name) as file:
                return file.read(most)
        except (OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError) as error:
            raise FileRefused(f"{name} is damaged: {error}") from None


def packages_at(path: Path, marker: str) -> Iterator[tuple[str, PackageFiles]]:
    """The packages at a path by their names: the folder itself and its folders, if they hold the file `marker`.

    The path may be a zip archive. A package is read before the next one is asked for. Raises FileRefused.
    """
    if path.suffix == ".zip":
        try:
            packed = zipfile.ZipFile(regular(path))
        except (OSError, zipfile.BadZipFile, RuntimeError, ValueError) as error:
            raise FileRefused(f"it is not a zip archive: {error}") from None
        with packed:
            by_folder: dict[str, list[zipfile.ZipInfo]] = {"": packed.infolist()}
            for info in packed.infolist():  # grouped once, so that many small packages take linear time
                by_folder.setdefault(f"{info.filename.partition('/')[0]}/", []).append(info)
            for prefix in sorted(by_folder):
                if f"{prefix}{marker}" in packed.NameToInfo:
                    yield prefix.rstrip("/") or path.stem, _Zipped(packed, prefix, by_folder[prefix])
    else:
        root = path.resolve()
        for file in (root / marker, *sorted(root.glob(f"*/{marker}"))):
            if file.is_file():
                yield root.stem if file.parent == root else file.parent.name, _Folder(file.parent)


# YAML.


def yaml_mapping(text: str) -> dict[str, Any]:
    """The mapping that a YAML text holds; empty for another value. Raises FileRefused."""
    import yaml

    if len(text) > MAX_YAML_BYTES:
        raise FileTooLarge(f"it is longer than {MAX_YAML_BYTES // 1024} KiB")
    try:
        value = yaml.load(text, _yaml_loader())  # a SafeLoader
    except FileTooLarge:
        raise
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise FileRefused(f"it is not YAML: {why_unreadable(error).splitlines()[0]}") from None
    return value if isinstance(value, dict) else {}


@cache
def _yaml_loader() -> Any:
    """A SafeLoader that counts nodes. An alias is one object in memory, but whoever copies or prints it gets many."""
    import yaml

    class Loader(yaml.SafeLoader):
        def __init__(self, stream: str) -> None:
            super().__init__(stream)
            self._weights: dict[int, int] = {}

        def compose_node(self, parent: Any, index: Any) -> Any:
            is_alias = self.check_event(yaml.AliasEvent)
            node = super().compose_node(parent, index)
            if not is_alias:
                values = node.value if isinstance(node, yaml.CollectionNode) else ()
                parts = (part for each in values for part in (each if isinstance(each, tuple) else (each,)))
                self._weights[id(node)] = 1 + sum(self._weights[id(part)] for part in parts)
            elif id(node) not in self._weights:
                raise yaml.YAMLError("an alias stands inside its own value")
            if self._weights[id(node)] > MAX_YAML_NODES:
                raise FileTooLarge(f"it has more than {MAX_YAML_NODES:,} values, aliases included")
            return node

    return Loader
