"""The folder where a generation worker keeps what it fetched from the learner.

INVARIANT: what stands under its final name had the size and SHA-256 that were asked for when it got that name; the
newest `KEPT` weights stay; nothing part-written is left by a fetch that failed, nor by a process before this one.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import TextIO

from nouscoder.domain.policy import PolicyManifest
from nouscoder.errors import Unusable
from nouscoder.generation.errors import PolicyUnusable

KEPT = 2
_PART = ".part"
_WEIGHTS = "*.safetensors"


class CacheUnusable(Unusable):
    """The cache folder cannot be used; the message names it."""


class PolicyCache:
    """Of one process: it holds a lock on the folder until `close`."""

    def __init__(self, folder: Path) -> None:
        """Raises CacheUnusable."""
        self._folder = folder
        self.first_folder = folder / "first"
        self._lock = self._take()

    def path_of(self, manifest: PolicyManifest) -> Path:
        """Where these weights are, or will be."""
        return self._folder / f"{manifest.policy_version:08d}-{manifest.sha256[:16]}.safetensors"

    async def keep_weights(self, manifest: PolicyManifest, pieces: AsyncIterator[bytes]) -> Path:
        """Store them and remove the oldest. Raises PolicyUnusable when they are not what the manifest says."""
        final = self.path_of(manifest)
        await _write(final, pieces, manifest.sha256, manifest.num_bytes)
        for path in sorted(self._folder.glob(_WEIGHTS))[:-KEPT]:
            path.unlink(missing_ok=True)
        return final

    async def keep_first(self, name: str, sha256: str, num_bytes: int, pieces: AsyncIterator[bytes]) -> None:
        """Store a file of the first policy's folder. Raises PolicyUnusable as `keep_weights`."""
        await _write(self.first_folder / Path(name).name, pieces, sha256, num_bytes)

    def close(self) -> None:
        """Let the folder go."""
        self._lock.close()

    def _take(self) -> TextIO:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = (self._folder / ".lock").open("w")
        except OSError as error:
            raise CacheUnusable(f"generation.cache {self._folder} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise CacheUnusable(f"another process uses generation.cache {self._folder}: give each its own") from None
        for part in self._folder.glob(f"*{_PART}"):
            part.unlink(missing_ok=True)
        # The first policy's files are small and asked for at each start, for they may be another run's.
        shutil.rmtree(self.first_folder, ignore_errors=True)
        return lock


async def _write(final: Path, pieces: AsyncIterator[bytes], sha256: str, num_bytes: int) -> None:
    part = final.with_name(final.name + _PART)
    digest, arrived = hashlib.sha256(), 0
    try:
        with _naming_faults(final):
            final.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as output:
                async with aclosing(pieces) as closing:  # type: ignore[type-var]
                    async for piece in closing:
                        arrived += len(piece)
                        if arrived > num_bytes:
                            break
                        await asyncio.to_thread(output.write, piece)
                        await asyncio.to_thread(digest.update, piece)
            if arrived != num_bytes:
                raise PolicyUnusable(f"{final.name} came with {arrived} bytes or more, {num_bytes} were announced")
            if digest.hexdigest() != sha256:
                raise PolicyUnusable(f"{final.name} came with the SHA-256 {digest.hexdigest()}, not {sha256}")
            part.replace(final)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _naming_faults(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PolicyUnusable(f"{path} cannot be written: {error.strerror or error}") from error
