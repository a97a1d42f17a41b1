"""The folder in which a generation worker keeps the policies that it has fetched from the learner.

INVARIANT: a file gets its final name only after its size and SHA-256 have been checked. The newest `KEPT` policies are
kept, and the base of the adapters among them. A failed fetch leaves no partial file, and partial files of an earlier
process are removed at the start. Only this user may enter the folder.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path

from nouscoder.atomic_files import FolderInUse, lock_file, sha256_of
from nouscoder.domain.policy import PolicyManifest, Shard
from nouscoder.errors import Unusable
from nouscoder.generation.weights.errors import PolicyUnusable
from nouscoder.policy_folder.delta import DeltaUnusable, apply_delta
from nouscoder.private_folder import NotPrivate, private_folder

KEPT = 2
_PART = ".part"
_WRITTEN_BYTES = 32 * 1024**2  # written and hashed at once: each call in a thread waits for Python's lock
_DELTA = ".delta"
_POLICIES = "????????-*"


class PolicyCache:
    """The cache of one process, which holds a lock on the folder until `close`."""

    def __init__(self, folder: Path) -> None:
        """Raises Unusable."""
        self._folder = folder
        self.first_folder = folder / "first"
        try:
            private_folder(self._folder)
            in_use = f"another process uses generation.cache {self._folder}: each needs its own"
            lock = lock_file(self._folder / ".lock", in_use)
        except NotPrivate as error:
            raise Unusable(f"generation.cache: {error}") from error
        except FolderInUse as error:
            raise Unusable(str(error)) from None
        except OSError as error:
            raise Unusable(f"generation.cache {self._folder} cannot be written: {error.strerror}") from error
        for ending in (_PART, _DELTA):
            for part in self._folder.glob(f"{_POLICIES}/*{ending}"):
                part.unlink(missing_ok=True)
        # The first policy's files may belong to another run. They are small, so each start fetches them again.
        shutil.rmtree(self.first_folder, ignore_errors=True)
        self._lock = lock

    def paths_of(self, manifest: PolicyManifest) -> tuple[Path, ...]:
        """The paths of this policy's shards, whether or not they exist, in the order of the manifest."""
        folder = self._of(manifest.policy_version, manifest.digest)
        return tuple(folder / shard.name for shard in manifest.shards)

    def bases_of(self, manifest: PolicyManifest) -> tuple[Path, ...]:
        """The files that the manifest's delta changes, in the order of its shards; () unless all are here."""
        if manifest.delta is None:
            return ()
        folder = self._of(manifest.delta.base_version, manifest.delta.base_digest)
        paths = tuple(folder / shard.name for shard in manifest.shards)
        return paths if all(path.is_file() for path in paths) else ()

    async def keep_shard(self, path: Path, shard: Shard, pieces: AsyncIterator[bytes]) -> None:
        """Store a shard under one of `paths_of`. Raises PolicyUnusable when its size or SHA-256 is wrong."""
        try:
            await _write_checked(path, pieces, shard.sha256, shard.num_bytes)
        finally:
            with suppress(OSError):  # the folder is not empty, or was never made
                path.parent.rmdir()

    async def keep_changed(
        self, path: Path, shard: Shard, base: Path, delta: Shard, pieces: AsyncIterator[bytes]
    ) -> None:
        """Make a shard, under one of `paths_of`, from `base` and the pieces of its delta. Raises PolicyUnusable."""
        changes = path.with_name(path.name + _DELTA)
        try:
            await _write_checked(changes, pieces, delta.sha256, delta.num_bytes)
            await asyncio.to_thread(_make, path, shard, base, changes)
        finally:
            changes.unlink(missing_ok=True)
            with suppress(OSError):
                path.parent.rmdir()

    async def keep_first(self, name: str, sha256: str, num_bytes: int, pieces: AsyncIterator[bytes]) -> None:
        """Store a file of the first policy's folder. Raises PolicyUnusable like `keep_shard`."""
        await _write_checked(self.first_folder / Path(name).name, pieces, sha256, num_bytes)

    def prune(self, base: PolicyManifest | None = None) -> None:
        """Remove all but the newest `KEPT` policies and `base`."""
        kept = None if base is None else self._of(base.policy_version, base.digest)
        for path in sorted(self._folder.glob(_POLICIES))[:-KEPT]:
            if path != kept:
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Release the lock on the folder."""
        self._lock.close()

    def _of(self, policy_version: int, digest: str) -> Path:
        return self._folder / f"{policy_version:08d}-{digest[:16]}"


async def _write_checked(final: Path, pieces: AsyncIterator[bytes], sha256: str, num_bytes: int) -> None:
    digest, arrived, written, waiting = hashlib.sha256(), 0, 0, list[bytes]()
    with _appearing(final) as part:
        with part.open("wb") as output:

            def write() -> None:
                nonlocal written
                data = b"".join(waiting)
                waiting.clear()
                output.write(data)
                digest.update(data)
                written += len(data)

            async with aclosing(pieces) as closing:  # type: ignore[type-var]
                async for piece in closing:
                    arrived += len(piece)
                    if arrived > num_bytes:
                        break
                    waiting.append(piece)
                    if arrived - written >= _WRITTEN_BYTES:
                        await asyncio.to_thread(write)
            await asyncio.to_thread(write)
        if arrived != num_bytes:
            raise PolicyUnusable(f"{final.name} has {arrived} bytes or more, not {num_bytes}")
        if digest.hexdigest() != sha256:
            raise PolicyUnusable(f"{final.name} has the SHA-256 {digest.hexdigest()}, not {sha256}")


def _make(final: Path, shard: Shard, base: Path, delta: Path) -> None:
    with _appearing(final) as part:
        try:
            apply_delta(base, delta, part)
        except DeltaUnusable as error:
            raise PolicyUnusable(str(error)) from error
        sha256 = sha256_of(part)
        if sha256 != shard.sha256:
            raise PolicyUnusable(f"{final.name} made from a delta has the SHA-256 {sha256}, not {shard.sha256}")


@contextmanager
def _appearing(final: Path) -> Iterator[Path]:
    """A place beside `final`, which becomes `final` after the block. Raises PolicyUnusable if it cannot be written."""
    part = final.with_name(final.name + _PART)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        yield part
        part.replace(final)
    except OSError as error:
        raise PolicyUnusable(f"{final} cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
