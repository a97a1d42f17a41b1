"""The publishing half of a learner as a process: it writes policies and sends them from its memory.

    sending_learner.py FOLDER
prints the address of its service, then reads a line of JSON for each policy:
    {"run": NAME, "version": 3, "weights": FILE, "is_other": false, "wait_s": 0.0, "die_after": null}
and answers it with the manifest. Each run has a folder of its own. With `is_other` the memory has another value than
the file, `wait_s` passes before each piece, and after `die_after` pieces the process kills itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file

from nouscoder.config import load_config
from nouscoder.domain.policy import WeightTransfer
from nouscoder.learner.publication.policy_files import PolicyFiles
from nouscoder.learner.publication.publisher import PolicyPublisher, StagedPolicy
from nouscoder.learner.publication.sender import PolicySender
from nouscoder.learner.servicer import STATUS_CODES, LearnerServicer
from nouscoder.learner.state.run_files import RunFiles
from nouscoder.policy_transfer.transfer import ShardImage
from nouscoder.rpc.server import Served, start_grpc
from nouscoder.v1 import learner_pb2_grpc

_SHARD_BYTES = 16 * 1024  # several files, each of which is at least one piece
_pieces = ShardImage.pieces


def with_faults(wait_s: float, die_after: int | None) -> Any:
    """ShardImage.pieces of a process that is slow or dies."""
    sent = 0

    def pieces(image: ShardImage, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        nonlocal sent
        for piece in _pieces(image, buffer):
            if sent == die_after:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(wait_s)
            yield piece
            sent += 1

    return pieces


async def serve(root: Path) -> None:
    """Serve until the end of stdin."""
    settings = {"run.root": str(root), "generation.engine": "vllm", "generation.vllm.weight_transfer": "gloo"}
    config = load_config(None, [f'{name}="{value}"' for name, value in settings.items()])
    sender = PolicySender(config)
    publishers: dict[str, PolicyPublisher] = {}
    async with AsyncExitStack() as stack:

        def register(server: Any) -> None:
            servicer = LearnerServicer(None, 0, PolicyFiles(RunFiles.of(config)), sender)  # type: ignore[arg-type]
            learner_pb2_grpc.add_LearnerServiceServicer_to_server(servicer, server)

        served = Served(
            *("127.0.0.1:0", "127.0.0.1:0", ["nouscoder.v1.LearnerService"], register, CollectorRegistry()),
            drain_s=0.1,
            status_codes=STATUS_CODES,
        )
        print(await start_grpc(served, stack), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            policy = StagedPolicy(order["version"], order["version"], load_file(order["weights"]))
            if order["run"] not in publishers:
                folder = root / order["run"]
                publishers[order["run"]] = PolicyPublisher(folder, keep=2, shard_bytes=_SHARD_BYTES, deltas=True)
            manifest = publishers[order["run"]].write(policy)
            if order["is_other"]:
                next(iter(policy.weights.values())).view(-1)[0] += 1
            ShardImage.pieces = with_faults(order["wait_s"], order["die_after"])  # type: ignore[method-assign]
            sender._transfer = WeightTransfer(order["transfer"])
            sender.offer(policy, manifest)
            print(json.dumps(asdict(manifest)), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
