"""The sources of the weights of a manifest: a folder shared with the learner, the learner's files, or its memory.

INVARIANT: each path that a source returns is a file with the size and SHA-256 of the manifest, checked here. For every
transport of a policy, and with or without a delta, the returned files give all tensors of the policy: those of an
adapter come with those of its base. A base is checked again only after its files have changed. Whatever fails on the
way from the learner's memory, the caller is told to take the files, and the engine samples on meanwhile: only an engine
that no longer runs is an error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from nouscoder.atomic_files import sha256_of
from nouscoder.domain.policy import PolicyFile, PolicyManifest, Shard, Transport
from nouscoder.generation.engines.base import EngineError, EngineStopped
from nouscoder.generation.metrics import FetchResult, GenerationMetrics
from nouscoder.generation.weights.cache import PolicyCache
from nouscoder.generation.weights.errors import PolicyGone, PolicyUnusable
from nouscoder.policy_folder.weights_files import FileState, state_of
from nouscoder.retry import Retry
from nouscoder.rpc.channel import PeerBusy, PeerError, PeerNotFound, PeerUnreachable
from nouscoder.rpc.learner_client import LearnerClient

if TYPE_CHECKING:
    from nouscoder.generation.engines.vllm import VllmEngine

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
_MAX_BAD = 3  # incomplete or wrong transfers of one file in a row
_AGAIN_S = 1.0
_WEIGHTS = (".safetensors", ".safetensors.index.json")
# Many engines ask for a new policy at once, and the learner sends to a few at a time.
_BUSY = Retry("a transfer from the learner's memory", (PeerBusy,), for_s=120.0, wait_s=0.2)


def check_shard(shard: Shard, path: Path) -> None:
    """Raises PolicyUnusable when the file is missing or has another size or SHA-256."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes != shard.num_bytes:
            raise PolicyUnusable(f"{path} has {num_bytes} bytes, its manifest says {shard.num_bytes}")
        sha256 = sha256_of(path)
    except OSError as error:
        raise PolicyUnusable(f"{path} cannot be read: {error.strerror}") from error
    if sha256 != shard.sha256:
        raise PolicyUnusable(f"{path} has the SHA-256 {sha256}, its manifest says {shard.sha256}")


class CheckedShards:
    """Remembers which files were right, so that the base of adapters is read once and not with each of them."""

    def __init__(self) -> None:
        self._right: dict[Path, tuple[str, FileState]] = {}

    def check(self, shard: Shard, path: Path) -> None:
        """As `check_shard`, but a file that has not changed since it was right is not read again."""
        try:
            found = (shard.sha256, state_of(path))
        except OSError as error:
            raise PolicyUnusable(f"{path} cannot be read: {error.strerror}") from error
        if self._right.get(path) != found:
            check_shard(shard, path)
            self._right[path] = found


class FolderSource:
    """Reads the folder of the manifest, which the learner writes and every generation worker can read."""

    def __init__(self) -> None:
        self._bases = CheckedShards()

    async def files_of(self, manifest: PolicyManifest) -> tuple[Path, ...]:
        """The checked shards, after those of the base, which is never removed. Raises PolicyUnusable and PolicyGone."""
        if manifest.transport is not Transport.FOLDER:
            raise PolicyUnusable(
                f"policy version {manifest.policy_version} must be fetched from the learner:"
                ' set generation.policy_from to "learner"'
            )
        if manifest.policy_version and not await asyncio.to_thread(Path(manifest.folder).is_dir):
            raise PolicyGone(f"{manifest.folder} is gone: the learner has removed it")
        base = () if manifest.base is None else await _checked(manifest.base, self._bases.check)
        return (*base, *await _checked(manifest, check_shard))


async def _checked(manifest: PolicyManifest, check: Callable[[Shard, Path], None]) -> tuple[Path, ...]:
    """The shards in the folder of the manifest."""
    paths = tuple(Path(manifest.folder) / shard.name for shard in manifest.shards)
    for path, shard in zip(paths, manifest.shards, strict=True):
        await asyncio.to_thread(check, shard, path)
    return paths


class LearnerSource:
    """Fetches shards from the learner into a cache, one at a time. Waits `patience_s` seconds for an absent learner.

    Where the policy before is in the cache, it fetches only the changes, if the manifest has them.
    """

    def __init__(
        self, client: LearnerClient, cache: PolicyCache, metrics: GenerationMetrics, patience_s: float
    ) -> None:
        self._client = client
        self._cache = cache
        self._metrics = metrics
        self._patience_s = patience_s
        self._bases = CheckedShards()
        self._one_at_a_time = asyncio.Lock()

    async def first_folder(self) -> Path:
        """Fetch the first policy's folder without its weights, which are fetched like those of any version.

        Raises PeerUnreachable when the learner does not answer in time, PolicyUnusable after repeated bad transfers.
        """
        log.info("fetching the policy folder from the learner")
        for file in await self._patiently("the policy's files", self._client.first_files):
            if not file.name.endswith(_WEIGHTS):
                await self._patiently(file.name, partial(self._keep_first, file))
        return self._cache.first_folder

    async def files_of(self, manifest: PolicyManifest) -> tuple[Path, ...]:
        """As FolderSource.files_of, but in the cache. Missing and damaged ones are fetched."""
        async with self._one_at_a_time:
            base = () if manifest.base is None else await self._here(manifest.base, self._bases.check)
            files = (*base, *await self._here(manifest, check_shard))
            self._cache.prune(manifest.base)
            return files

    async def _here(self, manifest: PolicyManifest, check: Callable[[Shard, Path], None]) -> tuple[Path, ...]:
        """The shards in the cache, after those that `check` refuses have been fetched."""
        paths = self._cache.paths_of(manifest)
        missing = [
            index
            for index, (path, shard) in enumerate(zip(paths, manifest.shards, strict=True))
            if not await asyncio.to_thread(_is_whole, check, shard, path)
        ]
        if missing:
            await self._fetch(manifest, missing)
        return paths

    async def _fetch(self, manifest: PolicyManifest, missing: Sequence[int]) -> None:
        """Get the missing shards, of which these are the indices."""
        version = manifest.policy_version
        started_s = time.monotonic()
        result = FetchResult.FAILED
        try:
            if await self._fetch_changes(manifest, missing):
                result = FetchResult.CHANGES
            else:
                for path, shard in ((self._cache.paths_of(manifest)[at], manifest.shards[at]) for at in missing):
                    what = f"policy version {version}, {shard.name}"
                    await self._patiently(what, partial(self._keep, version, path, shard))
                result = FetchResult.FETCHED
        except PeerNotFound as error:
            result = FetchResult.GONE
            raise PolicyGone(str(error)) from error
        except PeerError as error:
            raise PolicyUnusable(f"policy version {version} cannot be fetched: {error}") from error
        finally:
            self._metrics.policy_fetches.labels(result.value).inc()
        seconds = time.monotonic() - started_s
        self._metrics.policy_fetch_seconds.observe(seconds)
        log.info(
            "policy fetched",
            extra={"policy_version": version, "fetch_s": round(seconds, 3), "result": result.value},
        )

    async def _fetch_changes(self, manifest: PolicyManifest, missing: Sequence[int]) -> bool:
        """Make the missing shards from the policy before. False when it is not here or the shards came out wrong."""
        bases, paths = self._cache.bases_of(manifest), self._cache.paths_of(manifest)
        if manifest.delta is None or not bases:
            return False
        try:
            for index in missing:
                shard, delta = manifest.shards[index], manifest.delta.files[index]
                pieces = self._client.shard(manifest.policy_version, delta)
                await self._cache.keep_changed(paths[index], shard, bases[index], delta, pieces)
        except (PolicyUnusable, PeerError) as error:
            log.warning("a delta is of no use, the whole policy is fetched", extra={"reason": str(error)})
            return False
        return True

    async def _keep(self, version: int, path: Path, shard: Shard) -> None:
        await self._cache.keep_shard(path, shard, self._client.shard(version, shard))

    async def _keep_first(self, file: PolicyFile) -> None:
        await self._cache.keep_first(file.name, file.sha256, file.num_bytes, self._client.first_file(file.name))

    async def _patiently(self, what: str, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """Retry for `patience_s` while the learner does not answer, and up to `_MAX_BAD` times after bad transfers."""
        damaged = Retry(
            f"{what} from the learner", (PolicyUnusable,), max_tries=_MAX_BAD, wait_s=_AGAIN_S, log_after_s=0.0
        )
        away = Retry(f"{what} from the learner", (PeerUnreachable,), for_s=self._patience_s, wait_s=_AGAIN_S)
        try:
            return await away.call(lambda: damaged.call(ask))
        except PeerUnreachable as error:
            raise PeerUnreachable(f"{what} did not arrive within {self._patience_s:.0f} s: {error}") from error


PolicySource = FolderSource | LearnerSource


def _is_whole(check: Callable[[Shard, Path], None], shard: Shard, path: Path) -> bool:
    try:
        check(shard, path)
    except PolicyUnusable:
        return False
    return True


class LearnerMemory:
    """Has the learner send policies to the processes of one engine, without files, one at a time."""

    def __init__(self, client: LearnerClient, engine: VllmEngine, metrics: GenerationMetrics) -> None:
        self._client = client
        self._engine = engine
        self._metrics = metrics
        self._one_at_a_time = asyncio.Lock()
        self._digests: dict[int, str] = {}  # of the policies that the engine may hold in memory

    async def stage(self, manifest: PolicyManifest) -> bool:
        """Whether the engine now holds the policy beside the one in use. Raises EngineStopped."""
        version = manifest.policy_version
        started_s = time.monotonic()
        async with self._one_at_a_time:
            try:
                # Where the learner sends the policy, or only its changes.
                in_use = self._engine.version_in_memory
                base = {version: digest for version, digest in self._digests.items() if version == in_use}
                self._digests = {**base, manifest.policy_version: manifest.digest}
                wanted = (manifest.policy_version, manifest.digest, self._engine.num_receivers, "".join(base.values()))
                rendezvous = await _BUSY.call(lambda: self._client.send_policy(*wanted))
                await self._engine.stage_policy(manifest, rendezvous)
            except EngineStopped:
                raise
            except (PeerError, EngineError) as error:
                reason = {"policy_version": version, "reason": str(error)}
                log.warning("a policy did not come from the learner's memory, its files are taken", extra=reason)
                self._metrics.policy_fetches.labels(FetchResult.NOT_FROM_MEMORY.value).inc()
                return False
        seconds = time.monotonic() - started_s
        self._metrics.policy_fetches.labels(FetchResult.FROM_MEMORY.value).inc()
        self._metrics.policy_fetch_seconds.observe(seconds)
        extra = {"policy_version": version, "fetch_s": round(seconds, 3), "changes": rendezvous.changes}
        log.info("policy received from memory", extra=extra)
        return True

    async def load(self, policy_version: int) -> float:
        """Load the staged policy. Returns the seconds for which decoding paused. Raises EngineError."""
        return await self._engine.load_staged(policy_version)
