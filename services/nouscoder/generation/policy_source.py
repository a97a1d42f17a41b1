"""Where the weights behind a manifest come from: a folder shared with the learner, or the learner itself.

INVARIANT: a path that a source answers is of a file with the size and SHA-256 that the manifest names, checked here.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

from nouscoder.domain.policy import PolicyManifest
from nouscoder.generation.errors import PolicyGone, PolicyUnusable
from nouscoder.generation.metrics import FetchResult, GenerationMetrics
from nouscoder.generation.policy_cache import PolicyCache
from nouscoder.rpc.channel import PeerError, PeerUnreachable
from nouscoder.rpc.policy_client import NotKept, PolicyClient, RemoteFile

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
_MAX_BAD = 3  # torn or wrong transfers of the same file, one after the other
_AGAIN_S = 1.0
_TELL_EVERY_S = 30.0
_WEIGHTS = ".safetensors"


class PolicySource(Protocol):
    """Answers where a policy's weights are on this machine."""

    async def path_of(self, manifest: PolicyManifest) -> Path:
        """A checked file. Raises PolicyUnusable, PolicyGone."""
        ...


def verify_manifest(manifest: PolicyManifest, path: Path) -> None:
    """Raises PolicyUnusable when the file is missing, or of another size or SHA-256."""
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise PolicyUnusable(f"{path} cannot be read: {error.strerror}") from error
    if num_bytes != manifest.num_bytes:
        raise PolicyUnusable(f"{path} has {num_bytes} bytes, its manifest says {manifest.num_bytes}")
    if sha256 != manifest.sha256:
        raise PolicyUnusable(f"{path} has the SHA-256 {sha256}, its manifest says {manifest.sha256}")


class FolderSource:
    """The manifest's own path: a folder that the learner writes and every generation worker reads."""

    async def path_of(self, manifest: PolicyManifest) -> Path:
        """The manifest's path."""
        await asyncio.to_thread(verify_manifest, manifest, Path(manifest.path))
        return Path(manifest.path)


class LearnerSource:
    """Fetches what is not here. One fetch at a time; a learner that is away is waited for `patience_s` seconds."""

    def __init__(self, client: PolicyClient, cache: PolicyCache, metrics: GenerationMetrics, patience_s: float) -> None:
        self._client = client
        self._cache = cache
        self._metrics = metrics
        self._patience_s = patience_s
        self._one_at_a_time = asyncio.Lock()

    async def first_folder(self) -> Path:
        """The first policy's configuration and tokenizer, fetched; its weights come like those of any version.

        Raises PeerUnreachable when the learner does not answer in time, PolicyUnusable when files keep coming wrong.
        """
        log.info("fetching the policy folder from the learner")
        for file in await self._patiently("the policy's files", self._client.first_files):
            if not file.name.endswith(_WEIGHTS):
                await self._patiently(file.name, lambda file=file: self._keep_first(file))  # type: ignore[misc]
        return self._cache.first_folder

    async def path_of(self, manifest: PolicyManifest) -> Path:
        """The weights: kept from before, or fetched. The manifest's path is one of the learner's disk."""
        async with self._one_at_a_time:
            path = self._cache.path_of(manifest)
            return path if await asyncio.to_thread(_is_whole, manifest, path) else await self._fetch(manifest)

    async def _fetch(self, manifest: PolicyManifest) -> Path:
        started_s = time.monotonic()
        name = f"policy version {manifest.policy_version}"
        result = FetchResult.FAILED
        try:
            path = await self._patiently(
                name, lambda: self._cache.keep_weights(manifest, self._client.published(manifest))
            )
            result = FetchResult.FETCHED
        except NotKept as error:
            result = FetchResult.GONE
            raise PolicyGone(str(error)) from error
        except PeerError as error:
            raise PolicyUnusable(f"{name} cannot be fetched: {error}") from error
        finally:
            self._metrics.policy_fetches.labels(result.value).inc()
        seconds = time.monotonic() - started_s
        self._metrics.policy_fetch_seconds.observe(seconds)
        log.info("policy fetched", extra={"policy_version": manifest.policy_version, "fetch_s": round(seconds, 3)})
        return path

    async def _keep_first(self, file: RemoteFile) -> None:
        await self._cache.keep_first(file.name, file.sha256, file.num_bytes, self._client.first_file(file.name))

    async def _patiently(self, what: str, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """Ask again while the learner is away, for a limited time, and when what came was wrong, a few times."""
        end = time.monotonic() + self._patience_s
        told_s = float("-inf")
        num_bad = 0
        while True:
            try:
                return await ask()
            except PeerUnreachable as error:
                if time.monotonic() >= end:
                    raise PeerUnreachable(f"{what} did not come within {self._patience_s:.0f} s: {error}") from error
                if time.monotonic() - told_s >= _TELL_EVERY_S:
                    told_s = time.monotonic()
                    log.warning("waiting for the learner", extra={"wanted": what, "reason": str(error)})
            except PolicyUnusable as error:
                num_bad += 1
                if num_bad == _MAX_BAD:
                    raise
                log.warning("fetched again", extra={"wanted": what, "reason": str(error)})
            await asyncio.sleep(_AGAIN_S)


def _is_whole(manifest: PolicyManifest, path: Path) -> bool:
    try:
        verify_manifest(manifest, path)
    except PolicyUnusable:
        return False
    return True
