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
from contextlib import contextmanager, suppress
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


# What the system answers about a disk or a place that a person gave, and that no code of ours can mend.
_FULL = (errno.ENOSPC, errno.EDQUOT)
_OF_DISKS = (*_FULL, errno.EIO, errno.EROFS)
_OF_PLACES = (
    *(errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR),
    *(errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
)
# torch, safetensors, tokenizers and SQLite wrap errors of the system, or have only a text of their own.
_TEXTS_WHEN_FULL = (
    *("No space left", "quota exceeded", "disk is full"),
    *("PytorchStreamWriter failed writing", "inline_container.cc"),
)
_TEXTS_OF_DISKS = (*_TEXTS_WHEN_FULL, "readonly database", "unable to open database file", "disk I/O error")


def _says(error: BaseException, numbers: tuple[int, ...], texts: tuple[str, ...]) -> bool:
    if isinstance(error, OSError):
        return error.errno in numbers
    return not isinstance(error, NousCoderError) and any(text in str(error) for text in texts)


def storage_fault(error: BaseException) -> StorageError | None:
    """The sentence for an error that no command expected, or for its cause, if a disk or a place is at fault."""
    if isinstance(error, NousCoderError):  # its sentence is right, and its exit code that of what it was about
        cause = error.__cause__
        while isinstance(cause, NousCoderError):
            cause = cause.__cause__
        of_disk = cause is not None and _says(cause, _OF_DISKS, _TEXTS_OF_DISKS)
        return StorageError(str(error)) if of_disk else None
    if isinstance(error, OSError) and error.errno in (*_OF_DISKS, *_OF_PLACES) and error.filename:
        return StorageError(f"{error.filename} cannot be used: {error.strerror}")
    if not _says(error, _OF_DISKS, _TEXTS_OF_DISKS):
        return None
    # Of a stream, which does not know its name, or by a library, whose words are its own.
    return StorageError(f"the output cannot be written: {os.strerror(getattr(error, 'errno', 0) or errno.ENOSPC)}")


@contextmanager
def naming_storage_faults(path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a StorageError about `path` with a message of one sentence."""
    try:
        yield
    except Exception as error:
        if _says(error, _FULL, _TEXTS_WHEN_FULL):
            full = f"the disk is full: {path} was not written; free some space, then go on with the same command"
            raise StorageError(full) from error
        if isinstance(error, OSError):
            raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error
        raise


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """A folder to write into. It replaces `final` at the end; it goes when the body raises. Raises StorageError."""
    part = final.with_name(final.name + _PART)
    with naming_storage_faults(final), whole_or_gone(part):
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
    with naming_storage_faults(final), whole_or_gone(part):
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
    """Whether a new folder cannot be written here, because there is a file, a link, or a folder with files."""
    return os.path.lexists(path) and (not path.is_dir() or any(path.iterdir()))


@contextmanager
def whole_or_gone(*places: Path) -> Iterator[None]:
    """When the block fails, not after Ctrl-C, remove those of `places` that it made, and the empty folders above."""
    missing = [place for place in places if not place.exists()]
    above = [folder for place in places for folder in place.parents if not folder.exists()]  # the deepest first
    try:
        yield
    except Exception:
        for made in missing:
            remove(made)
        for folder in above:
            with suppress(OSError):
                folder.rmdir()
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
