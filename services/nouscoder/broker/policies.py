"""Published policies: only the newest is kept.

INVARIANT: versions start at 0 and rise by 1, except that restore.lua sets the version of the learner's books. A version
never gets other weights.
"""

from __future__ import annotations

from nouscoder.broker.errors import Behind, Refused
from nouscoder.broker.store import Store
from nouscoder.domain.policy import PolicyManifest
from nouscoder.rpc.pairs import MANIFEST


async def publish(store: Store, manifest: PolicyManifest) -> int:
    """Take a policy; returns the newest version. The newest one may be published again.

    Raises Refused when it is too old or its weights differ, and Behind when Redis lacks the version before it.
    """
    version = manifest.policy_version
    taken, newest = await store.run("publish_policy", version, manifest.digest, MANIFEST.encode(manifest))
    if taken:
        return int(newest)
    if version == newest:
        raise Refused(f"policy version {version} was published before with other weights")
    if version > newest:
        raise Behind(f"policy version {version} is out of order: {int(newest) + 1} comes next")
    raise Refused(f"policy version {version} is out of order: {int(newest) + 1} comes next")


async def newest(store: Store) -> PolicyManifest | None:
    """The newest policy, None while there is none."""
    (data,) = await store.fields("meta", "policy")
    return None if data is None else MANIFEST.decode(data)
