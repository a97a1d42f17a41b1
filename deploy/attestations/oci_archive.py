"""What an image holds, read from an OCI archive: its digest, its labels, and the files that list its packages.

Format: https://github.com/opencontainers/image-spec (image-layout.md, manifest.md, layer.md).

INVARIANT: nothing is read of a blob before its content has the digest that names it.
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

_PACKAGE_FILES = re.compile(r"(var/lib/dpkg/status|etc/os-release|usr/lib/os-release|.*\.dist-info/METADATA)")
_HIDDEN, _EMPTY_FOLDER = ".wh.", ".wh..wh..opq"  # marks of a layer: one path, or all of a folder, is not in the image
_MOST_BYTES = 64 << 20  # of one file that is read


class UnreadableArchive(Exception):
    """The file is not an OCI archive of one image. The message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Image:
    """One image. `digest` is that of its manifest (sha256:...), which a registry shows when the same bytes are pushed.

    `files` holds the package lists by their path in the image.
    """

    digest: str
    created: str
    architecture: str
    labels: Mapping[str, str]
    files: Mapping[str, bytes]


def read_archive(path: Path) -> Image:
    """The image of an OCI archive. Raises UnreadableArchive and OSError."""
    try:
        with tarfile.open(path) as archive:
            return _image(archive)
    except (tarfile.TarError, EOFError, zlib.error, KeyError, ValueError, TypeError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise UnreadableArchive(f"{path} is not an OCI archive of one image: {reason}") from error


def _image(archive: tarfile.TarFile) -> Image:
    listed = json.load(_member(archive, "index.json"))["manifests"]
    if len(listed) != 1:
        raise ValueError(f"it has {len(listed)} manifests, not one")
    digest = str(listed[0]["digest"])
    manifest = json.load(_blob(archive, digest))
    config = json.load(_blob(archive, manifest["config"]["digest"]))
    files: dict[str, bytes] = {}
    for layer in manifest["layers"]:
        with tarfile.open(fileobj=_blob(archive, layer["digest"]), mode="r:*") as opened:
            _apply(opened, files)
    return Image(
        digest, str(config["created"]), str(config["architecture"]), config.get("config", {}).get("Labels") or {}, files
    )


def _apply(layer: tarfile.TarFile, files: dict[str, bytes]) -> None:
    """Let a layer hide, replace and add files."""
    for entry in layer:
        path = PurePosixPath(entry.name.removeprefix("./").lstrip("/"))
        if path.name == _EMPTY_FOLDER:
            _remove(files, path.parent)
        elif path.name.startswith(_HIDDEN):
            _remove(files, path.with_name(path.name.removeprefix(_HIDDEN)))
        elif entry.isfile() and entry.size <= _MOST_BYTES and _PACKAGE_FILES.fullmatch(str(path)):
            opened = layer.extractfile(entry)
            if opened is not None:
                files[str(path)] = opened.read()


def _remove(files: dict[str, bytes], path: PurePosixPath) -> None:
    for name in [name for name in files if PurePosixPath(name).is_relative_to(path)]:
        del files[name]


def _blob(archive: tarfile.TarFile, digest: Any) -> IO[bytes]:
    kind, _, name = str(digest).partition(":")
    opened = _member(archive, f"blobs/{kind}/{name}")
    if kind != "sha256" or hashlib.file_digest(opened, kind).hexdigest() != name:  # type: ignore[arg-type]
        raise ValueError(f"the content of {digest} has another digest")
    opened.seek(0)
    return opened


def _member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    opened = archive.extractfile(name)
    if opened is None:
        raise ValueError(f"{name} is not a file")
    return opened
