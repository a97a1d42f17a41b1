"""Reads policies from the learner's disk for services that share no disk with it.

INVARIANT: it opens only files that it has listed in the folder of the first policy or of a published version. A name
from a request is looked up in that list and never joined to a path.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

from nouscoder.atomic_files import sha256_of
from nouscoder.domain.policy import PolicyFile
from nouscoder.errors import NousCoderError
from nouscoder.learner.publication.publisher import version_folder
from nouscoder.learner.state.run_files import RunFiles
from nouscoder.policy_folder.weights_files import (
    FileState,
    state_of,
)

CHUNK_BYTES = 1024**2

# The files of a policy in a Hugging Face folder, and deltas.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\.(json|txt|model|jinja|safetensors|delta)")


class NoSuchPolicyFile(NousCoderError):
    """The file does not exist or was pruned. The message names it."""


class PolicyFiles:
    """The policy files of one run. Methods read the disk, so do not call them in the event loop."""

    def __init__(self, files: RunFiles) -> None:
        self._first = files.policy
        self._published, self._kept = files.policies, files.kept
        self._digests: dict[Path, tuple[FileState, str]] = {}

    def first(self) -> list[PolicyFile]:
        """The files of the first policy, by name. Raises NoSuchPolicyFile when there is no policy yet."""
        paths = sorted(_files_of(self._first).items())
        found = [PolicyFile(name, self._sha256(path), path.stat().st_size) for name, path in paths]
        if not found:
            raise NoSuchPolicyFile(f"there is no policy in {self._first} yet")
        return found

    def open_first(self, name: str) -> BinaryIO:
        """Open one of the files that `first` lists. Raises NoSuchPolicyFile."""
        path = _files_of(self._first).get(name)
        if path is None:
            raise NoSuchPolicyFile(f"the first policy has no file {name[:100]!r}")
        return path.open("rb")

    def open_published(self, policy_version: int, name: str, sha256: str) -> BinaryIO:
        """Open a shard of a version. It stays readable when it is pruned later. Raises NoSuchPolicyFile."""
        folders = [version_folder(parent, policy_version) for parent in (self._published, self._kept)]
        if policy_version == 0:
            # The input files of the run: the first evaluation measures them, and they are the base of adapters.
            folders.append(self._first)
        for path in (_files_of(folder).get(name) for folder in folders):
            try:
                if path is not None and self._sha256(path) == sha256:
                    return path.open("rb")
            except OSError:
                continue  # pruned in the meantime
        raise NoSuchPolicyFile(
            f"{name[:100]!r} of policy version {policy_version} with the SHA-256 {sha256[:64]!r} is not kept here"
        )

    def _sha256(self, path: Path) -> str:
        """The digest of a file, cached until the file changes, because weights are large and every worker needs it."""
        state = state_of(path)
        known = self._digests.get(path)
        if known is None or known[0] != state:
            known = self._digests[path] = (state, sha256_of(path))
        return known[1]


def _files_of(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        return {}
    return {path.name: path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_file()}


def chunks(file: BinaryIO) -> Generator[bytes, None, None]:
    """The contents in pieces of `CHUNK_BYTES`. Closes the file at the end."""
    with file:
        while data := file.read(CHUNK_BYTES):
            yield data
