"""Loads published policies into one engine: those that a client requests, and those that the broker announces.

INVARIANT: the version in use decreases only when a client asks for that, after the training. Weights are loaded only
from files, or bytes in memory, with the size and SHA-256 that the manifest names. One policy is loaded at a time. Of
those that came meanwhile the newest is loaded next, and the older ones only if it fails. While a policy is pinned none
is loaded. A policy that does not come from the learner's memory is taken from its files. One that cannot be loaded
leaves the previous one in use. No policy is taken whose maker has another tokenizer, and version 0 of the learner has
the tensors of version 0 in use (PoliciesDiffer).
`follow_policies` ends only with an error: PoliciesDiffer, without any policy, after three policies in a row that could
not be loaded, or when no policy follows one that the learner removed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from nouscoder.domain.policy import PolicyManifest
from nouscoder.generation.engines.base import Engine, EngineError, EngineStopped
from nouscoder.generation.weights.errors import PoliciesDiffer, PolicyGone, PolicyRefused, PolicyUnusable
from nouscoder.generation.weights.source import FolderSource, LearnerMemory, PolicySource
from nouscoder.policy_folder.identity import differing_file, differing_tensor
from nouscoder.retry import Retry

log = logging.getLogger(__name__)

# A policy that the learner has removed is skipped without a retry, because a newer one follows.
_LOADING = Retry(
    "loading a policy",
    (PolicyUnusable,),
    max_tries=4,
    wait_s=0.5,
    log_after_s=0.0,
    is_passing=lambda error: not isinstance(error, PolicyGone),
)
_MAX_BAD_POLICIES = 3
_NEWER_LIMIT_S = 900.0


class Policies:
    """Holds the policy in use and replaces it with newer ones."""

    def __init__(
        self,
        engine: Engine,
        source: PolicySource | None = None,
        memory: LearnerMemory | None = None,
        tokenizer: Sequence[str] = (),
    ) -> None:
        """`source` has the files. `memory`, if given, is tried before it. `tokenizer`: see `tokenizer_digests`."""
        self._engine = engine
        self._source = source or FolderSource()
        self._memory = memory
        self._tokenizer = tokenizer
        self.current: PolicyManifest | None = None  # in use
        self._files: tuple[Path, ...] = ()  # of version 0 in use
        self._loading = False
        self._pending: list[int] = []  # versions that are loaded or wait for it
        self._turns = asyncio.Condition()
        self._taken = asyncio.Condition()
        self._pins: set[object] = set()
        self._unpinned = asyncio.Event()
        self._unpinned.set()

    @property
    def is_pinned(self) -> bool:
        """Whether newer policies wait because the one in use is pinned."""
        return bool(self._pins)

    @asynccontextmanager
    async def pinned(self, policy_version: int, limit_s: float) -> AsyncIterator[None]:
        """Keep the policy in use in the block, for `limit_s` seconds at most. Raises PolicyRefused for another."""
        pin = object()
        self._pins.add(pin)
        self._unpinned.clear()
        expiry = asyncio.get_running_loop().call_later(limit_s, self._expire, pin)
        try:
            async with self._turns:  # a policy may be loading just now
                await self._turns.wait_for(lambda: not self._loading)
            if self._version != policy_version:
                raise PolicyRefused(f"policy version {policy_version} is not in use: version {self._version} is")
            yield
        finally:
            expiry.cancel()
            self._unpin(pin)

    async def wait_for(self, policy_version: int) -> None:
        """Wait until a policy of this version or a newer one is in use."""
        async with self._taken:
            await self._taken.wait_for(lambda: self._version >= policy_version)

    async def update(self, manifest: PolicyManifest, *, older: bool = False) -> float:
        """Load a policy that a client requests; that in use changes nothing. Returns the seconds of the pause.

        With `older` an older version is loaded too. Raises PolicyRefused for one without that or for other weights of
        the same version, PoliciesDiffer and PolicyUnusable.
        """
        if older and manifest.policy_version < self._version:
            self._check_tokenizer(manifest)
            files = await self._source.files_of(manifest)
            async with self._turn(manifest.policy_version):
                return await self._take(manifest, files)
        pause_s = await self._taken_if_newer(manifest)
        return self._known_again(manifest) if pause_s is None else pause_s

    async def follow(self, manifest: PolicyManifest) -> bool:
        """Load an announced policy; False if it is not newer. Raises PolicyUnusable, PolicyGone, PoliciesDiffer."""
        if await self._taken_if_newer(manifest) is not None:
            return True
        await self._check_weights(manifest)
        return False

    async def _taken_if_newer(self, manifest: PolicyManifest) -> float | None:
        """Load a policy that is newer than the one in use. Returns the seconds of the pause; None when it is not."""
        self._check_tokenizer(manifest)
        if self._is_known(manifest):
            return None
        files = await self._files_unless_staged(manifest)  # outside the turn, because a fetch may take long
        async with self._turn(manifest.policy_version):
            return None if self._is_known(manifest) else await self._take(manifest, files)

    @property
    def _version(self) -> int:
        return -1 if self.current is None else self.current.policy_version

    def _is_known(self, manifest: PolicyManifest) -> bool:
        return manifest.policy_version <= self._version

    def _known_again(self, manifest: PolicyManifest) -> float:
        """0 for the policy in use. Raises PolicyRefused for any other."""
        current = self.current
        assert current is not None
        if (manifest.policy_version, manifest.digest) == (current.policy_version, current.digest):
            return 0.0
        raise PolicyRefused(
            f"policy version {manifest.policy_version} is not newer than version {current.policy_version},"
            " which is in use; restart the service to go back"
        )

    def _check_tokenizer(self, manifest: PolicyManifest) -> None:
        if not self._tokenizer or not manifest.tokenizer:
            return
        if (name := differing_file(self._tokenizer, manifest.tokenizer)) is not None:
            raise PoliciesDiffer(
                f"{name} is not the same in the policy folder of generation and in that of policy version"
                f" {manifest.policy_version}, {manifest.folder}: copy one folder to both"
            )

    async def _check_weights(self, manifest: PolicyManifest) -> None:
        """Compare version 0 of the learner with that in use, which came from the files that the run began with."""
        current = self.current
        if current is None or manifest.policy_version or current.policy_version:
            return
        if manifest.weights == current.weights or not (manifest.weights and current.weights and self._files):
            return
        files = await self._source.files_of(manifest.base or manifest)
        name = await asyncio.to_thread(differing_tensor, files, self._files)
        if name is not None:
            raise PoliciesDiffer(
                f"the learner trains another policy than generation samples from: {name} in {files[0].parent} is not"
                f" that in {self._files[0].parent}"
            )

    @asynccontextmanager
    async def _turn(self, policy_version: int) -> AsyncIterator[None]:
        """The right to load a policy. The newest version that waits goes first."""
        self._pending.append(policy_version)
        try:
            while True:
                await self._unpinned.wait()
                async with self._turns:
                    await self._turns.wait_for(lambda: not self._loading and policy_version == max(self._pending))
                    if not self._pins:
                        self._loading = True
                        break
            try:
                yield
            finally:
                self._loading = False
        finally:
            self._pending.remove(policy_version)
            async with self._turns:
                self._turns.notify_all()

    def _expire(self, pin: object) -> None:
        log.warning("a pin reached its time limit: newer policies are taken over")
        self._unpin(pin)

    def _unpin(self, pin: object) -> None:
        self._pins.discard(pin)
        if not self._pins:
            self._unpinned.set()

    async def _files_unless_staged(self, manifest: PolicyManifest) -> tuple[Path, ...] | None:
        """The files; None when the engine has received the policy from the learner's memory."""
        if self._memory is not None and await self._memory.stage(manifest):
            return None
        return await self._source.files_of(manifest)

    async def _load(self, manifest: PolicyManifest, files: tuple[Path, ...] | None) -> float:
        if files is None and self._memory is not None:
            try:
                return await self._memory.load(manifest.policy_version)
            except EngineStopped:
                raise
            except EngineError as error:
                log.warning("a policy in memory was not loaded, its files are taken", extra={"reason": str(error)})
        if files is None:
            files = await self._source.files_of(manifest)
        return await self._engine.load_policy(files, manifest.policy_version)

    async def _take(self, manifest: PolicyManifest, files: tuple[Path, ...] | None) -> float:
        try:
            pause_s = await self._load(manifest, files)
        except EngineStopped:
            raise
        except EngineError as error:
            raise PolicyUnusable(str(error)) from error
        async with self._taken:
            self.current, self._files = manifest, (files or ()) if not manifest.policy_version else ()
            self._taken.notify_all()
        log.info("policy taken over", extra={"policy_version": manifest.policy_version, "pause_s": round(pause_s, 4)})
        return pause_s


async def follow_policies(manifests: AsyncIterator[PolicyManifest], policies: Policies) -> None:
    """Load the policies of `manifests` until cancelled. Each load is tried up to 4 times.

    Raises PolicyUnusable when the first or three in a row cannot be loaded, and PolicyGone 900 s after a removed one.
    """
    bad_in_a_row = 0
    limit_s: float | None = None
    while True:
        try:
            async with asyncio.timeout(limit_s):
                manifest = await anext(manifests)
        except TimeoutError:
            raise PolicyGone(f"no newer policy came within {limit_s:.0f} s after a removed one") from None
        try:
            await _LOADING.call(partial(policies.follow, manifest))
            bad_in_a_row, limit_s = 0, None
        except PolicyGone as error:
            log.warning("policy skipped, a newer one follows", extra={"reason": str(error)})
            limit_s = _NEWER_LIMIT_S
        except PolicyUnusable as error:
            bad_in_a_row += 1
            if policies.current is None or bad_in_a_row == _MAX_BAD_POLICIES:
                raise
            log.error("policy not loaded, the previous one stays in use", extra={"reason": str(error)})
