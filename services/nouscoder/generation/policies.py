"""Which policy is in use: published files are checked, then taken over by the engine.

INVARIANT: the version in use never goes down, and weights are taken over only from a file of the size and SHA-256
that its manifest names.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from nouscoder.domain.policy import PolicyManifest
from nouscoder.generation.engine_thread import EngineStopped, EngineThread
from nouscoder.generation.engines.base import EngineError
from nouscoder.generation.errors import PolicyGone, PolicyRefused, PolicyUnusable
from nouscoder.generation.policy_source import FolderSource, PolicySource

__all__ = ["Policies", "PolicyGone", "PolicyRefused", "PolicyUnusable"]

log = logging.getLogger(__name__)


class Policies:
    """Takes over policies for one engine."""

    def __init__(self, engine: EngineThread, source: PolicySource | None = None) -> None:
        self._engine = engine
        self._source = source or FolderSource()
        self._current: PolicyManifest | None = None
        self._taking = asyncio.Lock()
        self._first = asyncio.Event()

    @property
    def current(self) -> PolicyManifest | None:
        """The policy in use."""
        return self._current

    async def wait_for_first(self) -> None:
        """Wait until there is a policy."""
        await self._first.wait()

    async def update(self, manifest: PolicyManifest) -> float:
        """Take over a policy on request; answers the seconds decoding stood still.

        The policy in use, again, is taken as done. Raises PolicyRefused for an older one or another one of the same
        version, and PolicyUnusable.
        """
        if self._is_known(manifest):
            return self._known_again(manifest)
        path = await self._source.path_of(manifest)  # outside the lock: it may have to be fetched
        async with self._taking:
            return self._known_again(manifest) if self._is_known(manifest) else await self._take(manifest, path)

    async def follow(self, manifest: PolicyManifest) -> bool:
        """Take over a policy the broker tells of, unless it is not newer. False: ignored.

        Raises PolicyUnusable, PolicyGone.
        """
        if self._is_known(manifest):
            return False
        path = await self._source.path_of(manifest)
        async with self._taking:
            if self._is_known(manifest):
                return False
            await self._take(manifest, path)
            return True

    def _is_known(self, manifest: PolicyManifest) -> bool:
        return self._current is not None and manifest.policy_version <= self._current.policy_version

    def _known_again(self, manifest: PolicyManifest) -> float:
        """0 for the policy in use. Raises PolicyRefused for any other."""
        current = self._current
        assert current is not None
        if (manifest.policy_version, manifest.sha256) == (current.policy_version, current.sha256):
            return 0.0
        raise PolicyRefused(
            f"policy version {manifest.policy_version} is not newer than version {current.policy_version},"
            " which is in use; restart the service to go back"
        )

    async def _take(self, manifest: PolicyManifest, path: Path) -> float:
        try:
            pause_s = await self._engine.load_policy(path, manifest.policy_version)
        except EngineStopped:
            raise
        except EngineError as error:
            raise PolicyUnusable(str(error)) from error
        self._current = manifest
        self._first.set()
        log.info("policy taken over", extra={"policy_version": manifest.policy_version, "pause_s": round(pause_s, 4)})
        return pause_s
