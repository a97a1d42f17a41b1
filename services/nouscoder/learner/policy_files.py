"""Reads policies from the learner's disk for services that share no disk with it.

INVARIANT: it opens only files that it lists itself, in the folder of the first policy or of a published version. A name
is looked up in such a list and never joined to a path.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from nouscoder.atomic_files import sha256_of
from nouscoder.errors import NousCoderError
from nouscoder.learner.core import RunFiles
from nouscoder.learner.publish import version_folder

CHUNK_BYTES = 1024**2
# What a Hugging Face folder of a policy consists of.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\.(json|txt|model|jinja|safetensors)")


class NoSuchPolicyFile(NousCoderError):
    """There is no such file, or no longer; the message names it."""


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """One file of the first policy's folder."""

    name: str
    sha256: str
    num_bytes: int


class PolicyFiles:
    """Of one run. Methods read the disk: call them off the event loop."""

    def __init__(self, files: RunFiles) -> None:
        self._first = files.policy
        self._published = files.policies
        self._digests: dict[Path, tuple[tuple[int, int], str]] = {}

    def first(self) -> list[PolicyFile]:
        """The first policy's files by name. Raises NoSuchPolicyFile when there is no policy yet."""
        paths = sorted(_files_of(self._first).items())
        found = [PolicyFile(name, self._sha256(path), path.stat().st_size) for name, path in paths]
        if not found:
            raise NoSuchPolicyFile(f"there is no policy in {self._first} yet")
        return found

    def open_first(self, name: str) -> BinaryIO:
        """One of those that `first` names. Raises NoSuchPolicyFile."""
        path = _files_of(self._first).get(name)
        if path is None:
            raise NoSuchPolicyFile(f"the first policy has no file {name[:100]!r}")
        return path.open("rb")

    def open_published(self, policy_version: int, name: str, sha256: str) -> BinaryIO:
        """A shard of a version; once open it stays readable while it is pruned. Raises NoSuchPolicyFile."""
        folders = [version_folder(self._published, policy_version)]
        if policy_version == 0:
            # The first evaluation comes before the learner publishes: it measures the files the run was given.
            folders.append(self._first)
        for path in (_files_of(folder).get(name) for folder in folders):
            try:
                if path is not None and self._sha256(path) == sha256:
                    return path.open("rb")
            except OSError:
                continue  # pruned meanwhile
        raise NoSuchPolicyFile(
            f"{name[:100]!r} of policy version {policy_version} with the SHA-256 {sha256[:64]!r} is not kept here"
        )

    def _sha256(self, path: Path) -> str:
        """Read once as long as the file stays as it is: weights are large, and asked for by every worker."""
        state = (path.stat().st_mtime_ns, path.stat().st_size)
        known = self._digests.get(path)
        if known is None or known[0] != state:
            known = self._digests[path] = (state, sha256_of(path))
        return known[1]


def _files_of(folder: Path) -> dict[str, Path]:
    """Name -> path of the files of a policy folder."""
    if not folder.is_dir():
        return {}
    return {path.name: path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_file()}


def chunks(file: BinaryIO) -> Generator[bytes, None, None]:
    """The file in pieces of `CHUNK_BYTES`; closes it at the end."""
    with file:
        while data := file.read(CHUNK_BYTES):
            yield data
