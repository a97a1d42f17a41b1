"""Sends the newest policy from the learner's memory to engines.

INVARIANT: only the newest published policy is sent, byte for byte as in its files. Training and publication never wait
for a transfer. Each transfer is one engine's, has a thread of its own, and ends by itself within the limits of
policy_transfer/group.py and `limit_s`, also when its receivers die.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from nouscoder.config import Config
from nouscoder.domain.policy import PolicyManifest, Rendezvous, WeightTransfer
from nouscoder.errors import NousCoderError, Unusable
from nouscoder.learner.publication.publisher import StagedPolicy
from nouscoder.policy_transfer.group import TransferError, missing_for, open_rendezvous
from nouscoder.policy_transfer.transfer import ShardImage, send_shards
from nouscoder.rpc.addresses import unix_path

log = logging.getLogger(__name__)

_MAX_TRANSFERS = 8  # each has a thread, a group and a buffer

_MAX_RECEIVERS = 64

_EVERYWHERE = ("0.0.0.0", "::", "[::]", "")


class NotInMemory(NousCoderError):
    """The policy is not the newest, or none is sent from memory here: its files must do."""


class TooManyTransfers(NousCoderError):
    """As many transfers as are allowed at once are in progress."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """The newest policy. `changes` are the files of its delta, for engines that hold the policy of `base_digest`."""

    policy_version: int
    digest: str
    images: tuple[ShardImage, ...]
    base_digest: str
    changes: tuple[ShardImage, ...]


class PolicySender:
    """Sends policies as generation.vllm.weight_transfer says; with `files` it sends none and keeps none in memory."""

    def __init__(self, config: Config) -> None:
        """Raises Unusable when this machine cannot send in this way."""
        self._transfer = config.generation.vllm.weight_transfer
        self._limit_s = config.generation.vllm.transfer_limit_s
        self._host = config.learner.transfer_host or _host_of(config.learner.grpc)
        # CUDA IPC is for processes that use one GPU. Others share the memory of the CPU.
        is_one_gpu = config.shares_device and config.generation.vllm.tensor_parallel_size == 1
        is_on_cpu = self._transfer is WeightTransfer.IPC and not is_one_gpu
        self._device = torch.device("cpu" if is_on_cpu else config.learner.device)
        self._offer: _Offer | None = None
        self._room = threading.BoundedSemaphore(_MAX_TRANSFERS)
        if missing := missing_for(self._transfer):
            raise Unusable(f"generation.vllm.weight_transfer: {missing}")

    def offer(self, policy: StagedPolicy, manifest: PolicyManifest) -> None:
        """Keep a policy whose files are written, instead of the one before. Any thread."""
        if self._transfer is WeightTransfer.FILES or policy.adapter is not None:
            return
        folder = Path(manifest.folder)
        try:
            images = tuple(ShardImage.of(folder / shard.name, policy.weights) for shard in manifest.shards)
        except TransferError as error:
            self._offer = None
            log.warning("a policy is not sent from memory", extra={"reason": str(error)})
            return
        self._offer = _Offer(manifest.policy_version, manifest.digest, images, *_changes_of(manifest))

    def begin(self, policy_version: int, digest: str, num_receivers: int, base_digest: str = "") -> Rendezvous:
        """Begin to send a policy to `num_receivers` processes, which meet there as ranks 1 and up.

        They get only the changes when they hold the policy before (`base_digest`) and it has a delta.

        Raises NotInMemory, TooManyTransfers, TransferError.
        """
        offer = self._offer
        if offer is None or (offer.policy_version, offer.digest) != (policy_version, digest):
            raise NotInMemory(f"policy version {policy_version} is not in the learner's memory: take its files")
        if not 1 <= num_receivers <= _MAX_RECEIVERS:
            raise NotInMemory(f"a transfer has 1 to {_MAX_RECEIVERS} receivers, not {num_receivers}")
        if not self._room.acquire(blocking=False):
            raise TooManyTransfers(f"{_MAX_TRANSFERS} transfers are in progress: take the files")
        try:
            rendezvous, store = open_rendezvous(self._host, 1 + num_receivers, self._transfer)
            rendezvous = replace(rendezvous, changes=bool(base_digest) and base_digest == offer.base_digest)
            # A daemon: a process that ends does not wait for a transfer.
            threading.Thread(
                target=self._send, args=(offer, rendezvous, store), name="policy-transfer", daemon=True
            ).start()
        except BaseException:
            self._room.release()
            raise
        return rendezvous

    def _send(self, offer: _Offer, rendezvous: Rendezvous, store: Store) -> None:
        started_s = time.monotonic()
        extra: dict[str, object] = {"policy_version": offer.policy_version}
        try:
            images = offer.changes if rendezvous.changes else offer.images
            send_shards(images, rendezvous, store, self._limit_s, self._device)
        except Exception as error:  # a failed transfer must not harm the learner
            log.warning("a policy was not sent", extra=extra | {"reason": str(error) or type(error).__name__})
        else:
            num_bytes = sum(image.num_bytes for image in images)
            seconds = round(time.monotonic() - started_s, 3)
            log.info("policy sent", extra=extra | {"num_bytes": num_bytes, "send_s": seconds})
        finally:
            self._room.release()


def _changes_of(manifest: PolicyManifest) -> tuple[str, tuple[ShardImage, ...]]:
    """(digest of the policy before, files of the delta); empty without a delta."""
    if manifest.delta is None:
        return "", ()
    try:
        files = [(Path(manifest.folder) / file.name).read_bytes() for file in manifest.delta.files]
    except OSError as error:
        log.warning("a delta is not sent from memory", extra={"reason": str(error)})
        return "", ()
    return manifest.delta.base_digest, tuple(ShardImage(data, ()) for data in files)


def _host_of(address: str) -> str:
    """The host of the learner's address, loopback for a unix socket.

    One that means every interface becomes the address of this machine's name.
    """
    if unix_path(address) is not None:
        return "127.0.0.1"
    host = address.rpartition(":")[0]
    if host not in _EVERYWHERE:
        return host
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
