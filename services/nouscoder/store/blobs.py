"""A store of files by name: a folder (also a volume that pods share) or an object store.

INVARIANT: a blob appears whole or not at all, and no name leads out of the store.
Methods block: call them outside of the event loop.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, BinaryIO, Protocol

from nouscoder.errors import ExitCode, NousCoderError, Unusable, why_unreadable
from nouscoder.store.packed_blobs import MAX_BYTES, PackedBlobs

if TYPE_CHECKING:
    from obstore.store import ObjectStore

CHUNK_BYTES = 1024**2
_NAME = re.compile(r"[a-z0-9-]+(/[A-Za-z0-9._-]{1,200}){1,4}")
_PART = ".part-"


class NoSuchBlob(NousCoderError):
    """There is no blob with this name."""


class BlobsUnavailable(NousCoderError):
    """The store cannot be read or written now; the message says why."""

    exit_code = ExitCode.UNAVAILABLE


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """A blob in the store. `modified_s` is the time of its last `put`, in seconds since 1970."""

    name: str
    num_bytes: int
    modified_s: float


class Blobs(Protocol):
    """The store. Every method raises BlobsUnavailable."""

    def put(self, name: str, data: bytes | BinaryIO | Path) -> None:
        """Keep `data`, or the content of a file, under this name. Replaces what was there."""

    def copy(self, name: str, source: Blobs) -> None:
        """Copy the blob of this name from another store. Raises NoSuchBlob."""

    def sync(self) -> None:
        """After this, everything that was put survives a power failure."""

    def read(self, name: str) -> Iterator[bytes]:
        """A blob in pieces. Raises NoSuchBlob, before the first piece."""

    def exists(self, name: str) -> bool:
        """Whether there is a blob with this name."""

    def delete(self, name: str) -> None:
        """Delete the blob, if there is one."""

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        """All blobs in the folder `prefix`, in no order."""


def open_blobs(place: str, *, bulk: bool = False) -> Blobs:
    """The store at `place`: a URL such as s3://bucket/prefix (or memory:///), else a folder.

    With `bulk` a blob survives a power failure only after `sync`; this is much faster for many blobs. Raises
    Unusable.
    """
    if "://" not in place:
        if os.path.lexists(place) and not os.path.isdir(place):
            raise Unusable(f"{place} is there and is no folder: give a folder or a URL for the files")
        return FolderBlobs(Path(place), bulk=bulk)
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    try:
        return ObjectBlobs(from_url(place))
    except (BaseError, ValueError) as error:
        raise Unusable(f"{place} is no store of files: {error}") from error


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name) or ".." in name or _PART in name:
        raise ValueError(f"{name[:100]!r} is no name of a blob")
    return name


def _put_pieces(blobs: Blobs, name: str, source: Blobs) -> None:
    with tempfile.NamedTemporaryFile(prefix="nouscoder-blob-") as file:
        for piece in source.read(name):
            file.write(piece)
        file.flush()
        blobs.put(name, Path(file.name))


def _created(path: str) -> BinaryIO:
    """A new file, with the folders that it needs. Raises OSError."""
    try:
        return open(path, "wb")  # for small blobs a Path takes as long as the file
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return open(path, "wb")


class FolderBlobs:
    """A folder on a disk or a shared volume. With `bulk` small blobs go to one file, `packed.sqlite`; all read it."""

    def __init__(self, folder: Path, *, bulk: bool = False) -> None:
        self._folder = folder
        self._bulk = bulk
        self._packed = PackedBlobs(folder / "packed.sqlite")
        self._has_unsynced = False

    def put(self, name: str, data: bytes | BinaryIO | Path) -> None:
        path = f"{self._folder}/{_checked(name)}"
        if self._bulk and not os.path.exists(path) and (small := _small(data)) is not None:
            with _pack_faults(path):
                self._packed.put(name, small)
            return
        self._has_unsynced = self._bulk
        part = f"{os.path.dirname(path)}/{_PART}{secrets.token_hex(8)}"
        try:
            with _created(part) as file:
                if isinstance(data, bytes):
                    file.write(data)
                elif isinstance(data, Path):
                    with data.open("rb") as source:
                        shutil.copyfileobj(source, file, CHUNK_BYTES)
                else:
                    shutil.copyfileobj(data, file, CHUNK_BYTES)
                if not self._bulk:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(part, path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(part)
            raise BlobsUnavailable(f"{path} cannot be written: {error.strerror or error}") from error

    def copy(self, name: str, source: Blobs) -> None:
        """See Blobs. On one file system this makes a hard link, because a blob is never changed in place."""
        if isinstance(source, FolderBlobs) and (small := source._read_packed(name)) is not None:
            self.put(name, small)
            return
        if not isinstance(source, FolderBlobs):
            _put_pieces(self, name, source)
            return
        path = self._folder / _checked(name)
        part = path.with_name(f"{_PART}{secrets.token_hex(8)}")
        self._has_unsynced = self._bulk
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(source._folder / name, part)
            part.replace(path)
            part.unlink(missing_ok=True)  # it remains when both were the same file
        except OSError:
            _put_pieces(self, name, source)

    def sync(self) -> None:
        if self._bulk:
            with _pack_faults(str(self._folder)):
                self._packed.flush()
        if self._has_unsynced:
            os.sync()
            self._has_unsynced = False

    def _read_packed(self, name: str) -> bytes | None:
        with _pack_faults(f"{self._folder}/{name}"):
            return self._packed.read(name)

    def read(self, name: str) -> Iterator[bytes]:
        path = self._folder / _checked(name)
        try:
            with path.open("rb") as file:
                while piece := file.read(CHUNK_BYTES):
                    yield piece
        except FileNotFoundError:
            small = self._read_packed(name)
            if small is None:
                raise NoSuchBlob(f"there is no {name} in {self._folder}") from None
            yield small
        except OSError as error:
            raise BlobsUnavailable(f"{path} cannot be read: {error.strerror or error}") from error

    def exists(self, name: str) -> bool:
        path = f"{self._folder}/{_checked(name)}"
        try:
            return S_ISREG(os.stat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return self._read_packed(name) is not None
        except OSError as error:
            raise BlobsUnavailable(f"{path} cannot be looked up: {error.strerror or error}") from error

    def delete(self, name: str) -> None:
        try:
            (self._folder / _checked(name)).unlink(missing_ok=True)
            with _pack_faults(f"{self._folder}/{name}"):
                self._packed.delete(name)
        except OSError as error:
            raise BlobsUnavailable(f"{self._folder / name} cannot be deleted: {error.strerror or error}") from error

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        with _pack_faults(f"{self._folder}/{prefix}"):
            packed = self._packed.list(prefix)
        yield from (BlobInfo(*found) for found in packed if not (self._folder / found[0]).exists())
        for folder, _, names in os.walk(self._folder / prefix):
            for name in names:
                if name.startswith(_PART):
                    continue
                path = Path(folder) / name
                with suppress(FileNotFoundError):  # deleted meanwhile
                    stat = path.stat()
                    yield BlobInfo(path.relative_to(self._folder).as_posix(), stat.st_size, stat.st_mtime)


def _small(data: bytes | BinaryIO | Path) -> bytes | None:
    """The data, if they are small enough to be packed. A file is then read to its end, else it is where it was."""
    if isinstance(data, bytes):
        return data if len(data) <= MAX_BYTES else None
    if isinstance(data, Path):
        return data.read_bytes() if data.stat().st_size <= MAX_BYTES else None
    begin = data.tell()
    found = data.read(MAX_BYTES + 1)
    if len(found) <= MAX_BYTES:
        return found
    data.seek(begin)
    return None


@contextmanager
def _pack_faults(what: str) -> Iterator[None]:
    """Raises BlobsUnavailable for the errors of the packed file."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise BlobsUnavailable(f"{what}: the packed blobs cannot be used: {why_unreadable(error)}") from error


class ObjectBlobs:
    """An object store, through obstore."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def put(self, name: str, data: bytes | BinaryIO | Path) -> None:
        with _object_faults(f"{name} cannot be written"):
            self._store.put(_checked(name), data)

    def copy(self, name: str, source: Blobs) -> None:
        _put_pieces(self, name, source)

    def sync(self) -> None:
        """See Blobs. Nothing to do: an object is durable when `put` returns."""

    def read(self, name: str) -> Iterator[bytes]:
        with _object_faults(f"{name} cannot be read"):
            try:
                for piece in self._store.get(_checked(name)).stream(min_chunk_size=CHUNK_BYTES):
                    yield bytes(piece)
            except FileNotFoundError:
                raise NoSuchBlob(f"there is no {name}") from None

    def exists(self, name: str) -> bool:
        with _object_faults(f"{name} cannot be looked up"), suppress(FileNotFoundError):
            self._store.head(_checked(name))
            return True
        return False

    def delete(self, name: str) -> None:
        with _object_faults(f"{name} cannot be deleted"), suppress(FileNotFoundError):
            self._store.delete(_checked(name))

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        with _object_faults(f"{prefix} cannot be listed"):
            for found in self._store.list(prefix):
                for item in found:
                    yield BlobInfo(item["path"], item["size"], item["last_modified"].timestamp())


@contextmanager
def _object_faults(what: str) -> Iterator[None]:
    """Raises BlobsUnavailable for the errors of an object store."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError) as error:
        raise BlobsUnavailable(f"{what}: {str(error).splitlines()[0]}") from error
