"""Policy manifests, protocol <-> domain. `manifest_from` and `decode_manifest` raise InvalidMessage."""

from __future__ import annotations

from nouscoder.domain.policy import PolicyDelta, PolicyManifest, Shard, Transport
from nouscoder.rpc.faults import InvalidMessage
from nouscoder.v1 import policy_pb2

_TRANSPORT_OUT = {kind: policy_pb2.PolicyTransport.Value(f"POLICY_TRANSPORT_{kind.name}") for kind in Transport}
_TRANSPORT_IN: dict[int, Transport] = {number: kind for kind, number in _TRANSPORT_OUT.items()}


def manifest_to(manifest: PolicyManifest) -> policy_pb2.PolicyManifest:
    """Domain -> protocol."""
    return policy_pb2.PolicyManifest(
        policy_version=manifest.policy_version,
        step=manifest.step,
        folder=manifest.folder,
        shards=map(_shard_to, manifest.shards),
        transport=_TRANSPORT_OUT[manifest.transport],
        delta=None if manifest.delta is None else _delta_to(manifest.delta),
        base=None if manifest.base is None else manifest_to(manifest.base),
    )


def manifest_from(message: policy_pb2.PolicyManifest) -> PolicyManifest:
    """Protocol -> domain."""
    if message.transport not in _TRANSPORT_IN:
        raise InvalidMessage(f"manifest.transport {message.transport} is not known here")
    try:
        return PolicyManifest(
            policy_version=message.policy_version,
            step=message.step,
            folder=message.folder,
            shards=tuple(map(_shard_from, message.shards)),
            transport=_TRANSPORT_IN[message.transport],
            delta=_delta_from(message.delta) if message.HasField("delta") else None,
            base=manifest_from(message.base) if message.HasField("base") else None,
        )
    except ValueError as error:
        raise InvalidMessage(f"manifest: {error}") from error


def _shard_to(shard: Shard) -> policy_pb2.PolicyShard:
    return policy_pb2.PolicyShard(name=shard.name, sha256=shard.sha256, num_bytes=shard.num_bytes)


def _shard_from(message: policy_pb2.PolicyShard) -> Shard:
    return Shard(message.name, message.sha256, message.num_bytes)


def _delta_to(delta: PolicyDelta) -> policy_pb2.PolicyDelta:
    files = map(_shard_to, delta.files)
    return policy_pb2.PolicyDelta(base_version=delta.base_version, base_digest=delta.base_digest, files=files)


def _delta_from(message: policy_pb2.PolicyDelta) -> PolicyDelta:
    return PolicyDelta(message.base_version, message.base_digest, tuple(map(_shard_from, message.files)))


def encode_manifest(manifest: PolicyManifest) -> bytes:
    """The bytes that are stored for a manifest."""
    return manifest_to(manifest).SerializeToString()


def decode_manifest(data: bytes) -> PolicyManifest:
    """The manifest stored as bytes."""
    return manifest_from(policy_pb2.PolicyManifest.FromString(data))
