"""Which policy is in use: published files are checked, then taken over by the engine.

INVARIANT: the version in use never goes down, and weights are taken over only from a file of the size and SHA-256
that its manifest names.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from pathlib import Path

from nouscoder.errors import NousCoderError
from nouscoder.generation.engine_thread import EngineStopped, EngineThread
from nouscoder.generation.engines.base import EngineError
from nouscoder.policy import PolicyManifest

log = logging.getLogger(__name__)


class PolicyUnusable(NousCoderError):
    """The file is not what the manifest says, or does not fit the engine. The old weights stay in use."""


class PolicyRefused(NousCoderError):
    """The manifest is older than the policy in use, or another one of the same version."""


def verify_manifest(manifest: PolicyManifest) -> None:
    """Raises PolicyUnusable when the file is missing, or of another size or SHA-256."""
    try:
        num_bytes = Path(manifest.path).stat().st_size
        with Path(manifest.path).open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise PolicyUnusable(f"{manifest.path} cannot be read: {error.strerror}") from error
    if num_bytes != manifest.num_bytes:
        raise PolicyUnusable(f"{manifest.path} has {num_bytes} bytes, its manifest says {manifest.num_bytes}")
    if sha256 != manifest.sha256:
        raise PolicyUnusable(f"{manifest.path} has the SHA-256 {sha256}, its manifest says {manifest.sha256}")


class Policies:
    """Takes over policies for one engine."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine
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
        async with self._taking:
            current = self._current
            if current is not None and manifest.policy_version <= current.policy_version:
                if (manifest.policy_version, manifest.sha256) == (current.policy_version, current.sha256):
                    return 0.0
                raise PolicyRefused(
                    f"policy version {manifest.policy_version} is not newer than version {current.policy_version},"
                    " which is in use; restart the service to go back"
                )
            return await self._take(manifest)

    async def follow(self, manifest: PolicyManifest) -> bool:
        """Take over a policy the broker tells of, unless it is not newer. False: ignored. Raises PolicyUnusable."""
        async with self._taking:
            if self._current is not None and manifest.policy_version <= self._current.policy_version:
                return False
            await self._take(manifest)
            return True

    async def _take(self, manifest: PolicyManifest) -> float:
        await asyncio.to_thread(verify_manifest, manifest)
        try:
            pause_s = await self._engine.load_policy(Path(manifest.path), manifest.policy_version)
        except EngineStopped:
            raise
        except EngineError as error:
            raise PolicyUnusable(str(error)) from error
        self._current = manifest
        self._first.set()
        log.info("policy taken over", extra={"policy_version": manifest.policy_version, "pause_s": round(pause_s, 4)})
        return pause_s
