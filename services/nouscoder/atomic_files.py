"""Files and folders that appear complete and survive a power failure, or do not appear at all.

INVARIANT: a file or folder gets its final name only after it has been written completely and flushed to the disk.

A lock that allows one process at a time to work in a folder.

INVARIANT: at most one process holds the lock of a file. The lock is released when its process exits for any reason.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO

from nouscoder.errors import ExitCode, NousCoderError

_PART = ".part"
_HASHED_BYTES = 32 * 1024**2  # read and hashed at once
_READABLE = 0o644  # safetensors makes files that only their owner may read, but other services read policies


class StorageError(NousCoderError):
    """A file cannot be written. The message names it and says what to do."""

    exit_code = ExitCode.STORAGE


_OF_WRITERS = ("No space left", "PytorchStreamWriter failed writing", "inline_container.cc")


@contextmanager
def naming_storage_faults(path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a StorageError about `path` with a message of one sentence."""
    try:
        yield
    except Exception as error:
        of_system = error if isinstance(error, OSError) else None
        # torch and safetensors wrap errors of the operating system, or have only a text of their own.
        text = any(sign in str(error) for sign in _OF_WRITERS)
        if text if of_system is None else of_system.errno in (errno.ENOSPC, errno.EDQUOT):
            full = f"the disk is full: {path} was not written; free some space and resume the run"
            raise StorageError(full) from error
        if of_system is not None:
            raise StorageError(f"{path} cannot be written: {of_system.strerror or error}") from error
        raise


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """A folder to write into. It replaces `final` at the end; it goes when the body raises. Raises StorageError."""
    part = final.with_name(final.name + _PART)
    with naming_storage_faults(final):
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            yield part
            for file in part.iterdir():
                file.chmod(_READABLE)
                flush(file)
            flush(part)
            shutil.rmtree(final, ignore_errors=True)
            part.rename(final)
            flush(final.parent)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise


@contextmanager
def whole_file(final: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """A file to write to, in the same way. No other user may ever read a `private` one. Raises StorageError."""
    part = final.with_name(final.name + _PART)
    with naming_storage_faults(final):
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            if private:
                part.unlink(missing_ok=True)
            with open(part, "xb" if private else "wb", opener=_for_this_user if private else None) as output:
                yield output
                output.flush()
                os.fsync(output.fileno())
            part.rename(final)
            flush(final.parent)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def write_whole(final: Path, data: bytes, *, private: bool = False) -> None:
    """Write `data` to the file `final`, which is replaced. `private` as for `whole_file`. Raises StorageError."""
    with whole_file(final, private=private) as output:
        output.write(data)


def is_taken(path: Path) -> bool:
    """Whether a new folder cannot be written here, because there is a file, or a folder that is not empty."""
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


def make_folder(folder: Path) -> Path | None:
    """Make a folder and those above it that are missing. Returns the topmost one that was made. Raises OSError."""
    missing = [place for place in (*reversed(folder.parents), folder) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing[0] if missing else None


@contextmanager
def removed_when_refused(made: Path | None) -> Iterator[None]:
    """Remove what `make_folder` made when the block, which reads input, raises a NousCoderError: it changes nothing."""
    try:
        yield
    except NousCoderError:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        raise


def numbered(folder: Path, suffix: str = "") -> dict[int, Path]:
    """The entries of `folder` named by a number (`00000012` and `suffix`), ascending, without incomplete ones."""
    found: dict[int, Path] = {}
    if folder.is_dir():
        for path in folder.iterdir():
            stem = path.name.removesuffix(suffix)
            if path.name == stem + suffix and stem.isdigit():
                found[int(stem)] = path
    return dict(sorted(found.items()))


def prune(folder: Path, keep: int) -> None:
    """Remove all but the `keep` highest numbers, and incomplete entries of a crash."""
    for path in [*numbered(folder).values()][:-keep]:
        remove(path)
    if folder.is_dir():
        for path in folder.glob(f"*{_PART}"):
            remove(path)


def link_or_copy(file: Path, place: Path) -> None:
    """Make `place` a hard link to `file`, or a copy where the file system has no such links. Raises OSError."""
    try:
        os.link(file.resolve(), place)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(file, place)


def remove(path: Path) -> None:
    """Remove a file or a whole folder."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sha256_of(file: Path) -> str:
    """The SHA-256 of a file as hexadecimal digits.

    Each read and each hash of a piece gives Python's lock away, so beside a busy event loop small pieces take long.
    """
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(_HASHED_BYTES, file.stat().st_size + 1)))
    with file.open("rb", buffering=0) as data:
        while size := data.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# A lock that allows one process at a time to work in a folder.


class FolderInUse(NousCoderError):
    """Another process works in the folder. The message names the folder."""

    exit_code = ExitCode.IN_USE


def no_link(path: str, flags: int) -> int:
    """An opener of files that another user may have replaced by a link: it is not followed."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o644)


def lock_file(file: Path, message: str) -> TextIOWrapper:
    """Lock `file`, made if missing, no link, until the result is closed. Raises FolderInUse(message) and OSError."""
    lock = os.fdopen(no_link(str(file), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC), "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise FolderInUse(message) from None
    return lock
