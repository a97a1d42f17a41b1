"""Policy manifests, protocol <-> domain. `manifest_from` and `decode_manifest` raise InvalidMessage."""

from __future__ import annotations

from nouscoder.domain.policy import Encoding, PolicyManifest, Shard, Transport
from nouscoder.rpc.faults import InvalidMessage
from nouscoder.v1 import policy_pb2

_TRANSPORT_OUT = {kind: policy_pb2.PolicyTransport.Value(f"POLICY_TRANSPORT_{kind.name}") for kind in Transport}
_TRANSPORT_IN: dict[int, Transport] = {number: kind for kind, number in _TRANSPORT_OUT.items()}
_ENCODING_OUT = {kind: policy_pb2.PolicyEncoding.Value(f"POLICY_ENCODING_{kind.name}") for kind in Encoding}
_ENCODING_IN: dict[int, Encoding] = {number: kind for kind, number in _ENCODING_OUT.items()}


def manifest_to(manifest: PolicyManifest) -> policy_pb2.PolicyManifest:
    """Domain -> protocol."""
    shards = [
        policy_pb2.PolicyShard(name=shard.name, sha256=shard.sha256, num_bytes=shard.num_bytes)
        for shard in manifest.shards
    ]
    return policy_pb2.PolicyManifest(
        policy_version=manifest.policy_version,
        step=manifest.step,
        folder=manifest.folder,
        shards=shards,
        transport=_TRANSPORT_OUT[manifest.transport],
        encoding=_ENCODING_OUT[manifest.encoding],
        base_version=manifest.base_version,
    )


def manifest_from(message: policy_pb2.PolicyManifest) -> PolicyManifest:
    """Protocol -> domain."""
    if message.transport not in _TRANSPORT_IN:
        raise InvalidMessage(f"manifest.transport {message.transport} is not known here")
    if message.encoding not in _ENCODING_IN:
        raise InvalidMessage(f"manifest.encoding {message.encoding} is not known here")
    try:
        return PolicyManifest(
            policy_version=message.policy_version,
            step=message.step,
            folder=message.folder,
            shards=tuple(Shard(shard.name, shard.sha256, shard.num_bytes) for shard in message.shards),
            transport=_TRANSPORT_IN[message.transport],
            encoding=_ENCODING_IN[message.encoding],
            base_version=message.base_version if message.HasField("base_version") else None,
        )
    except ValueError as error:
        raise InvalidMessage(f"manifest: {error}") from error


def encode_manifest(manifest: PolicyManifest) -> bytes:
    """The bytes that are stored for a manifest."""
    return manifest_to(manifest).SerializeToString()


def decode_manifest(data: bytes) -> PolicyManifest:
    """The manifest stored as bytes."""
    return manifest_from(policy_pb2.PolicyManifest.FromString(data))
