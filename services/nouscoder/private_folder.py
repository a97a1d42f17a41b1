"""Folders that only this user can enter, also in places that all users of the host share, such as /tmp.

INVARIANT: a folder that is returned here belongs to this user, no other user may read or change it, and its name is no
link. A folder that others could have written to is never used. As in every shared place, the folder above must be
sticky (as /tmp is) or not writable by others: otherwise they may move the folder away.

The path of a unix socket has at most 107 bytes. So `socket_folder` of a folder with a long path is in the temporary
folder, under a random name, and a link in the folder leads there.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from nouscoder.errors import Unusable

# Others may not list, read or enter.
PRIVATE = 0o700
_OF_OTHERS = 0o077
_MAX_SOCKET_PATH_BYTES = 107
_MAX_SOCKET_NAME_BYTES = 24
_PLAIN = re.compile(r"[A-Za-z0-9._~/-]+")  # characters that every form of an address takes as they are


class NotPrivate(Unusable):
    """The folder is another user's, is a link, or could be changed by others. The message names it and says why."""


class NoFolder(Unusable):
    """The temporary folder cannot be written."""


def private_folder(folder: Path) -> Path:
    """The folder, which is made when it is missing. Raises NotPrivate and OSError."""
    with suppress(FileExistsError):
        folder.mkdir(PRIVATE, parents=True)
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP, errno.EACCES):
            raise
        raise NotPrivate(f"{folder} is a link, a file or another user's: remove it, or name another folder") from error
    try:
        found = os.fstat(opened)
        if found.st_uid != os.geteuid():
            raise NotPrivate(f"{folder} belongs to user {found.st_uid}: remove it, or name another folder")
        if _others_could_write(found):
            raise NotPrivate(f"other users could write to {folder}: remove it, or name another folder")
        if found.st_mode & _OF_OTHERS:
            os.fchmod(opened, stat.S_IMODE(found.st_mode) & ~_OF_OTHERS)
    finally:
        os.close(opened)
    return folder


def temporary_folder(name: str) -> Path:
    """A folder of this user in the temporary folder, the same one at each call. Raises NoFolder.

    It is NAME-UID. Where that is not private, because another user has made it first, it is NAME-UID.RANDOM.
    """
    try:
        place = Path(tempfile.gettempdir())
        stem = f"{name}-{os.geteuid()}"
        for candidate in (place / stem, *sorted(place.glob(f"{stem}.*"))):
            with suppress(NotPrivate):
                return private_folder(candidate)
        return Path(tempfile.mkdtemp(prefix=f"{stem}.", dir=place))
    except OSError as error:
        raise NoFolder(f"no folder can be made in the temporary folder (TMPDIR): {error}") from error


def refuse_foreign(folder: Path) -> None:
    """Raises NotPrivate when another user than this one and root made the folder. For places that a person chose."""
    owner = folder.stat().st_uid
    if owner not in (0, os.geteuid()):
        raise NotPrivate(f"{folder} belongs to user {owner}: remove it, or name another folder")


def is_trusted(path: Path) -> bool:
    """Whether only this user or root could have written the file or folder. False when there is none, or a link."""
    try:
        found = path.lstat()
    except OSError:
        return False
    own = found.st_uid in (0, os.geteuid()) and not stat.S_ISLNK(found.st_mode)
    return own and not _others_could_write(found)


def _others_could_write(found: os.stat_result) -> bool:
    """Also the group, unless it is this user's alone: those have the number of the user, and a umask of 002."""
    of_the_user_alone = found.st_gid == os.getegid() == os.geteuid()
    return bool(found.st_mode & (stat.S_IWOTH if of_the_user_alone else stat.S_IWOTH | stat.S_IWGRP))


def user_cache(name: str) -> Path:
    """The folder for `name` in the user's cache, whether or not it exists."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nouscoder" / name


def writable_cache(name: str) -> Path:
    """The same, or a folder in the temporary folder where the user's cache cannot be written. Raises NoFolder."""
    with suppress(RuntimeError):  # this user has no home folder
        cache = user_cache(name)
        if os.access(next(place for place in (cache, *cache.parents) if place.exists()), os.W_OK):
            return cache
    return temporary_folder(f"nouscoder-{name}")


def sockets_of(folder: Path) -> Path:
    """The folder of the sockets of `folder`, whether or not it exists. The link there may be another one later."""
    link = folder.resolve() / "sockets"
    return Path(os.readlink(link)) if link.is_symlink() else link


def socket_folder(folder: Path) -> Path:
    """A private folder for the sockets of `folder`, the same one at each call. Raises NotPrivate and OSError."""
    folder.mkdir(PRIVATE, parents=True, exist_ok=True)
    place = sockets_of(folder)
    if _takes_sockets(place):
        try:
            return private_folder(place)
        except NotPrivate:
            if not (folder / "sockets").is_symlink():
                raise
    link = folder.resolve() / "sockets"
    made = Path(tempfile.mkdtemp(prefix="nouscoder-", dir=_short_place()))
    if link.is_dir() and not link.is_symlink():  # the folder was moved or copied here from a shorter path
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.symlink_to(made)
    return made


def _takes_sockets(folder: Path) -> bool:
    path = str(folder)
    fits = len(os.fsencode(path)) + 1 + _MAX_SOCKET_NAME_BYTES <= _MAX_SOCKET_PATH_BYTES
    return fits and _PLAIN.fullmatch(path) is not None


def _short_place() -> Path:
    """A temporary folder in which a folder with a random name has a short path."""
    place = Path(tempfile.gettempdir())
    return place if _takes_sockets(place / "nouscoder-12345678") else Path("/tmp")
