"""Published policies: only the newest is kept.

INVARIANT: versions start at 0 and rise by 1, unless a restored state (restore.lua) goes ahead to the learner's; a
version, once taken, keeps its weights.
"""

from __future__ import annotations

from nouscoder.broker.errors import Behind, Refused
from nouscoder.broker.store import Store
from nouscoder.domain.policy import PolicyManifest
from nouscoder.rpc.policy_convert import decode_manifest, encode_manifest


async def publish(store: Store, manifest: PolicyManifest) -> int:
    """Take a policy; answers the newest version. The newest again is fine.

    Raises Refused when it is too old, and Behind when the broker lacks the versions before it.
    """
    version = manifest.policy_version
    taken, newest = await store.run("publish_policy", version, manifest.digest, encode_manifest(manifest))
    if taken:
        return int(newest)
    if version == newest:
        raise Refused(f"policy version {version} was published before with other weights")
    if version > newest:
        raise Behind(f"policy version {version} is out of order: {int(newest) + 1} comes next")
    raise Refused(f"policy version {version} is out of order: {int(newest) + 1} comes next")


async def newest(store: Store) -> PolicyManifest | None:
    """The newest policy, None while there is none."""
    ((data,),) = await store.fields(["meta"], "policy")
    return None if data is None else decode_manifest(data)
