"""Publishes policies while training continues, and has the broker hold what was trained.

INVARIANT: after `settle` the broker holds what the learner trained, or the learner exits with a message that says why.

INVARIANT: versions reach the broker in order, each after its files are complete. At most one publication is in
progress. So when the weights of a version are copied, the broker knows all versions before it. The sender has a version
before the broker announces it.

INVARIANT: only the newest published policy is sent, byte for byte as in its files. Training and publication never wait
for a transfer. Each transfer is one engine's, has a thread of its own, and ends by itself within the limits of
policy_transfer/group.py and `limit_s`, also when its receivers die.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from nouscoder.config import Config
from nouscoder.domain.policy import PolicyManifest, Rendezvous, WeightTransfer
from nouscoder.errors import NousCoderError, Unusable
from nouscoder.learner.core import LearnerCore
from nouscoder.learner.metrics.prometheus import LearnerMetrics
from nouscoder.learner.publication.published import StagedPolicy
from nouscoder.learner.state.curriculum_copy import CurriculumCopy
from nouscoder.policy_transfer.group import TransferError, missing_for, open_rendezvous
from nouscoder.policy_transfer.transfer import ShardImage, send_shards
from nouscoder.rpc.addresses import unix_path
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.channel import PeerBehind, PeerRefused

log = logging.getLogger(__name__)

# Policies sent from memory to memory.

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


# Publications, and the broker's state after them.


class Recovery:
    """Used by the loop that trains and by the publication in the background; one call at a time."""

    def __init__(self, core: LearnerCore, broker: BrokerClient, curriculum: CurriculumCopy) -> None:
        self._core = core
        self._broker = broker
        self._curriculum = curriculum
        self._one_at_a_time = asyncio.Lock()

    async def settle(self, policy: PolicyManifest | None) -> bool:
        """Have the broker hold all that was trained, with `policy` as the newest.

        Returns True if it had forgotten something. Raises Unusable when the broker's state is of another run, or ahead
        of the learner's disk.
        """
        async with self._one_at_a_time:
            trained = replace(self._core.trained_state(policy), curriculum=await self._curriculum.state())
            try:
                restored = await self._broker.restore_run(trained)
            except PeerRefused as error:
                raise Unusable(str(error)) from error
        if restored.was_behind:
            log.warning(
                "the broker had forgotten a part of the run: restored from this learner's state",
                extra={"batches": self._core.progress.batch_id + 1, "rollouts_lost": restored.rollouts_lost},
            )
        return restored.was_behind


class Publication:
    """Publishes policies. The weights are copied in `training`, the training thread, and written in another thread."""

    def __init__(
        self,
        core: LearnerCore,
        broker: BrokerClient,
        metrics: LearnerMetrics,
        training: Executor,
        recovery: Recovery,
        sender: PolicySender | None = None,
    ) -> None:
        self._core = core
        self._broker = broker
        self._recovery = recovery
        self._metrics = metrics
        self._training = training
        self._sender = sender
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="publication")
        self._task: asyncio.Task[None] | None = None
        self.known_version = -1  # the newest that the broker is known to have
        self.newest: PolicyManifest | None = None  # that this process published

    def known(self, policy_version: int) -> None:
        """Record that the broker has this version."""
        self.known_version = max(self.known_version, policy_version)
        self._metrics.published(self.known_version)

    async def begin(self) -> None:
        """Wait for the previous publication or raise its error, copy the weights, and publish in the background."""
        await self.settle()
        loop = asyncio.get_running_loop()
        policy = await loop.run_in_executor(self._training, self._core.stage_policy)
        self._task = asyncio.create_task(self._publish(policy))

    async def settle(self) -> None:
        """Wait for the publication in progress. Raises its error."""
        if self._task is not None:
            await asyncio.shield(self._task)

    def raise_if_failed(self) -> None:
        """Raise the error of a failed publication, without waiting for one in progress."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def close(self) -> None:
        """Stop publishing. Files that are being written are completed first."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._writing.shutdown, wait=True)

    async def _publish(self, policy: StagedPolicy) -> None:
        loop = asyncio.get_running_loop()
        manifest = await loop.run_in_executor(self._writing, self._core.write_policy, policy)
        if self._sender is not None:
            await loop.run_in_executor(self._writing, self._sender.offer, policy, manifest)
        try:
            await self._broker.publish_policy(manifest)
        except PeerBehind:
            await self._recovery.settle(manifest)
        self.newest = manifest
        self.known(manifest.policy_version)
