"""A policy that a vLLM worker receives from the learner's memory, in a thread, while the worker decodes.

Orders and reports are plain values, because vLLM carries only those between its processes.

INVARIANT: `tensors` gives tensors only when all bytes have arrived, have the SHA-256 of the manifest, and hold finite
values. Any failure ends in the state `failed`, with its reason, and never in an error of the worker.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import astuple
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from nouscoder.domain.policy import PolicyManifest, Rendezvous, Shard, WeightTransfer
from nouscoder.policy_transfer.group import TransferError
from nouscoder.policy_transfer.transfer import changed, receive_shards, tensors_of


class ReceiverState(StrEnum):
    """How far a transfer is."""

    RECEIVING = "receiving"
    READY = "ready"
    FAILED = "failed"


def order_of(manifest: PolicyManifest, rendezvous: Rendezvous, limit_s: float) -> dict[str, Any]:
    """What a worker must know to receive a policy. With `base` it gets the files of the delta to that version."""
    delta = manifest.delta if rendezvous.changes else None
    sent = manifest.shards if delta is None else delta.files
    return {
        "policy_version": manifest.policy_version,
        "shards": [astuple(shard) for shard in manifest.shards],
        "sent": [astuple(file) for file in sent],
        "base": None if delta is None else delta.base_version,
        "rendezvous": [rendezvous.host, rendezvous.port, rendezvous.num_ranks, rendezvous.transfer.value],
        "limit_s": limit_s,
    }


class PolicyReceiver:
    """Receives one policy into the memory of the CPU."""

    def __init__(
        self, order: dict[str, Any], rank: int, device: torch.device, base: PolicyReceiver | None = None
    ) -> None:
        """Receive what `order_of` describes, as this rank. `device` is the worker's, `base` that of the order."""
        self._shards = [Shard(*shard) for shard in order["shards"]]
        self._sent = [Shard(*file) for file in order["sent"]]
        self._base = base
        host, port, num_ranks, transfer = order["rendezvous"]
        self._rendezvous = Rendezvous(host, port, num_ranks, WeightTransfer(transfer))
        self._limit_s = float(order["limit_s"])
        self._rank = rank
        self._device = device
        self._state = ReceiverState.RECEIVING
        self._reason = ""
        self._data: list[Tensor] = []
        self._tensors: dict[str, Tensor] = {}
        threading.Thread(target=self._run, name="policy-receiver", daemon=True).start()

    def report(self) -> dict[str, str]:
        """The state, and why it is `failed`."""
        return {"state": self._state.value, "reason": self._reason}

    def shapes(self) -> dict[str, list[int]]:
        """The shape of each tensor, by name."""
        return {name: list(tensor.shape) for name, tensor in self._tensors.items()}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name. Raises ValueError unless the state is `ready`."""
        if self._state is not ReceiverState.READY:
            raise ValueError(f"the policy is not in memory, but {self._state.value}: {self._reason}")
        return self._tensors

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            received = receive_shards(self._sent, self._rendezvous, self._rank, self._limit_s, self._device)
            self._data = received if self._base is None else self._changed(self._base, received)
            tensors: dict[str, Tensor] = {}
            for data in self._data:
                found = tensors_of(data)
                if twice := sorted(tensors.keys() & found.keys()):
                    raise TransferError(f"{twice[0]} is in two shards")
                tensors |= found
            self._tensors = tensors
            self._state = ReceiverState.READY
        except Exception as error:  # the worker goes on decoding, and the files are taken
            self._reason = str(error) or type(error).__name__
            self._state = ReceiverState.FAILED
        finally:
            self._base = None

    def _changed(self, base: PolicyReceiver, deltas: Sequence[Tensor]) -> list[Tensor]:
        base.tensors()  # raises ValueError unless it is whole
        parts = zip(base._data, deltas, self._shards, strict=True)
        return [changed(before, delta, shard) for before, delta, shard in parts]
