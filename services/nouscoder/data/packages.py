"""Packages that strangers made: folders of files, also in a zip archive.

INVARIANT: in memory are at most MAX_PACKAGE_BYTES of a package. Nothing outside a package is read, and nothing is
unpacked to the disk.
"""

from __future__ import annotations

import os
import stat
import zipfile
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from nouscoder.data.bounded_files import FileRefused
from nouscoder.input_file import regular

MAX_PACKAGE_BYTES = 1024**3
MAX_PACKAGE_FILES = 100_000


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
