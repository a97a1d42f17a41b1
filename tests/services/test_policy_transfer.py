"""Policies from the learner's memory: the same bytes as the files, and the files when anything goes wrong.

The engine here receives as a vLLM worker does, but loads nothing; tests/vllm/test_vllm_transfer.py has the real one.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nouscoder.config import Config, load_config
from nouscoder.domain.policy import PolicyManifest, Rendezvous, WeightTransfer
from nouscoder.generation.engines.base import Engine, EngineError
from nouscoder.generation.metrics import FetchResult, GenerationMetrics
from nouscoder.generation.weights.errors import PolicyUnusable
from nouscoder.generation.weights.policies import Policies
from nouscoder.generation.weights.receiver import PolicyReceiver, order_of
from nouscoder.generation.weights.source import LearnerMemory
from nouscoder.learner.publication.policy_files import PolicyFiles
from nouscoder.learner.publication.publisher import PolicyPublisher, StagedPolicy
from nouscoder.learner.publication.sender import NotInMemory, PolicySender, TooManyTransfers
from nouscoder.learner.servicer import STATUS_CODES, LearnerServicer
from nouscoder.learner.state.run_files import RunFiles
from nouscoder.policy_transfer import group, transfer
from nouscoder.policy_transfer.group import TransferError, open_rendezvous
from nouscoder.policy_transfer.transfer import ShardImage, receive_shards, send_shards, tensors_of
from nouscoder.rpc.learner_client import LearnerClient
from nouscoder.rpc.status_codes import StatusCodes
from nouscoder.v1 import learner_pb2_grpc

LIMIT_S = 120.0
PIECE_BYTES = 1000
CPU = torch.device("cpu")
BY_TCP_OR_MEMORY = [WeightTransfer.GLOO, WeightTransfer.IPC]


def weights(version: int) -> dict[str, Tensor]:
    """Tensors of several types and shapes, one of them empty, one without dimensions."""
    random = torch.Generator().manual_seed(version)
    return {
        "matrix": torch.randn(40, 30, generator=random),
        "half": torch.randn(7, 5, generator=random).bfloat16(),
        "norm": torch.randn(33, generator=random).half(),
        "empty": torch.empty(0, 4),
        "scale": torch.tensor(float(version)),
    }


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a shard has several."""
    monkeypatch.setattr(transfer, "PIECE_BYTES", PIECE_BYTES)


@pytest.mark.parametrize("piece_bytes", [1, 7, 1000, 10**6])
def test_the_pieces_are_the_bytes_of_the_file(tmp_path: Path, piece_bytes: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file(weights(1), file, metadata={"format": "pt"})
    image = ShardImage.of(file, weights(1))
    pieces = [piece.clone() for piece in image.pieces(torch.empty(piece_bytes, dtype=torch.uint8))]
    assert all(len(piece) == piece_bytes for piece in pieces[:-1])
    data = torch.cat(pieces)
    assert data.numpy().tobytes() == file.read_bytes()
    assert image.num_bytes == file.stat().st_size
    found, wanted = tensors_of(data), load_file(file)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor)


def with_header(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """Changes the header of a file's bytes, and keeps its length."""

    def changed(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return changed


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:4],
        lambda data: data[:-1],
        lambda data: (2**40).to_bytes(8, "little") + data[8:],
        lambda data: data[:8] + b"[" + data[9:],
        with_header(lambda header: header["matrix"].update(dtype="I64")),
        with_header(lambda header: header["matrix"].update(shape=[40, 31])),
        with_header(lambda header: header["matrix"].update(data_offsets=[4, 4804])),
        with_header(lambda header: header.update(more=3)),
    ],
)
def test_bytes_that_are_no_file_are_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    file = tmp_path / "model.safetensors"
    save_file(weights(1), file)
    data = damage(file.read_bytes())
    with pytest.raises(TransferError):
        tensors_of(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8))


@pytest.mark.parametrize("change", ["lacks a tensor", "other shape", "other type"])
def test_a_file_of_other_tensors_has_no_image(tmp_path: Path, change: str) -> None:
    file, memory = tmp_path / "model.safetensors", weights(1)
    save_file(memory, file)
    if change == "lacks a tensor":
        del memory["norm"]
    else:
        memory["norm"] = memory["norm"][:-1] if change == "other shape" else memory["norm"].float()
    with pytest.raises(TransferError, match="norm in the file is not the one in memory"):
        ShardImage.of(file, memory)


def publisher_in(folder: Path, *, deltas: bool = False) -> PolicyPublisher:
    """Writes each policy to two files."""
    return PolicyPublisher(folder, keep=2, shard_bytes=4900, deltas=deltas)


def published(folder: Path, version: int) -> tuple[StagedPolicy, PolicyManifest]:
    """A policy without a delta."""
    policy = StagedPolicy(version, version, weights(version))
    return policy, publisher_in(folder).write(policy)


def images_of(policy: StagedPolicy, manifest: PolicyManifest) -> list[ShardImage]:
    return [ShardImage.of(Path(manifest.folder) / shard.name, policy.weights) for shard in manifest.shards]


@pytest.mark.parametrize("kind", BY_TCP_OR_MEMORY)
def test_each_of_several_receivers_gets_all_bytes(tmp_path: Path, kind: WeightTransfer) -> None:
    policy, manifest = published(tmp_path, 1)
    assert len(manifest.shards) == 2
    rendezvous, store = open_rendezvous("127.0.0.1", 3, kind)
    received: dict[int, list[Tensor]] = {}

    def receive(rank: int) -> None:
        received[rank] = receive_shards(manifest.shards, rendezvous, rank, LIMIT_S)

    threads = [threading.Thread(target=receive, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    send_shards(images_of(policy, manifest), rendezvous, store, LIMIT_S)
    for thread in threads:
        thread.join(LIMIT_S)
    wanted = [(Path(manifest.folder) / shard.name).read_bytes() for shard in manifest.shards]
    for rank in (1, 2):
        assert [data.numpy().tobytes() for data in received[rank]] == wanted


@pytest.mark.parametrize("kind", BY_TCP_OR_MEMORY)
def test_nobody_waits_for_ever_for_a_process_that_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: WeightTransfer
) -> None:
    monkeypatch.setattr(group, "RENDEZVOUS_LIMIT_S", 0.3)
    policy, manifest = published(tmp_path, 1)
    rendezvous, store = open_rendezvous("127.0.0.1", 2, kind)
    with pytest.raises(TransferError, match="not all of the 2 processes came"):
        send_shards(images_of(policy, manifest), rendezvous, store, LIMIT_S)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    gone = Rendezvous("127.0.0.1", port, 2, kind)
    with pytest.raises(TransferError, match=r"nobody is at 127\.0\.0\.1"):
        receive_shards(manifest.shards, gone, 1, LIMIT_S)


def test_nccl_is_refused_where_there_is_no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert group.missing_for(WeightTransfer.NCCL) == "nccl needs CUDA, and torch finds no GPU here"
    assert group.missing_for(WeightTransfer.GLOO) == ""


def test_nccl_carries_the_same_bytes(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, one a rank; torch finds {torch.cuda.device_count()}")
    policy, manifest = published(tmp_path, 1)
    rendezvous, store = open_rendezvous("127.0.0.1", 2, WeightTransfer.NCCL)
    received: list[list[Tensor]] = []
    receiving = threading.Thread(
        target=lambda: received.append(receive_shards(manifest.shards, rendezvous, 1, LIMIT_S, torch.device("cuda:1")))
    )
    receiving.start()
    send_shards(images_of(policy, manifest), rendezvous, store, LIMIT_S, torch.device("cuda:0"))
    receiving.join(LIMIT_S)
    wanted = [(Path(manifest.folder) / shard.name).read_bytes() for shard in manifest.shards]
    assert [data.numpy().tobytes() for data in received[0]] == wanted


def received_by_another_process(
    folder: Path, manifest: PolicyManifest, rendezvous: Rendezvous, device: str
) -> subprocess.Popen[bytes]:
    """It writes the shards that it has received to the files `folder`/0, 1 ..."""
    orders = [[(shard.name, shard.sha256, shard.num_bytes) for shard in manifest.shards], str(folder), device]
    program = (
        "import sys, json, torch\nfrom pathlib import Path\nfrom nouscoder.domain.policy import *\n"
        "from nouscoder.policy_transfer import group, transfer\n"
        "(shards, folder, device), (host, port, num, kind, size) = map(json.loads, sys.argv[1:])\n"
        "group.PIECE_BYTES = transfer.PIECE_BYTES = size\n"
        "met = Rendezvous(host, port, num, WeightTransfer(kind))\n"
        "got = transfer.receive_shards([Shard(*shard) for shard in shards], met, 1, 60.0, torch.device(device))\n"
        "[Path(folder, str(i)).write_bytes(data.numpy().tobytes()) for i, data in enumerate(got)]"
    )
    place = [rendezvous.host, rendezvous.port, rendezvous.num_ranks, rendezvous.transfer, PIECE_BYTES]
    return subprocess.Popen([sys.executable, "-c", program, json.dumps(orders), json.dumps(place)])


def test_two_processes_share_the_memory_of_a_gpu(tmp_path: Path) -> None:
    """tests/vllm/test_vllm_transfer.py has two processes that share the CPU's."""
    if not torch.cuda.is_available():
        pytest.skip("needs one CUDA device, whose memory two processes share; torch finds none")
    policy, manifest = published(tmp_path, 1)
    rendezvous, store = open_rendezvous("127.0.0.1", 2, WeightTransfer.IPC)
    receiver = received_by_another_process(tmp_path, manifest, rendezvous, "cuda")
    send_shards(images_of(policy, manifest), rendezvous, store, LIMIT_S, torch.device("cuda"))
    assert receiver.wait(LIMIT_S) == 0
    for number, shard in enumerate(manifest.shards):
        assert (tmp_path / str(number)).read_bytes() == (Path(manifest.folder) / shard.name).read_bytes()


def test_the_memory_of_a_gpu_is_no_use_to_a_process_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _, store = open_rendezvous("127.0.0.1", 2, WeightTransfer.IPC)
    store.set("buffer", json.dumps([0, "00", 8, 0, "00", 0, "00", False]))
    with pytest.raises(TransferError, match="the sender shares the memory of a GPU, and this process uses cpu"):
        group.IpcGroup(store, 1, 2, CPU)


@pytest.mark.parametrize(
    ("settings", "device"),
    [
        ({"generation.device": "cuda", "learner.device": "cuda:0"}, "cuda:0"),
        ({"generation.device": "cuda:1", "learner.device": "cuda:0"}, "cpu"),
        ({"generation.device": "cuda", "learner.device": "cuda", "generation.vllm.tensor_parallel_size": "2"}, "cpu"),
        ({"generation.device": "cuda", "learner.device": "cuda", "run.services": "external"}, "cpu"),
        ({}, "cpu"),
    ],
)
def test_the_memory_of_a_gpu_is_shared_where_both_use_it(settings: dict[str, str], device: str) -> None:
    own = ["generation.engine=vllm", "generation.vllm.weight_transfer=ipc"]
    config = load_config(None, [*own, *(f"{name}={value}" for name, value in settings.items())])
    assert PolicySender(config)._device == torch.device(device)


class ReceivingEngine:
    """Receives as a vLLM worker does. Loading is only noted."""

    num_receivers = 1

    def __init__(self) -> None:
        self.loaded: list[tuple[int, str]] = []
        self.refuses_staged = False
        self.receiver: PolicyReceiver | None = None
        self.held: PolicyReceiver | None = None
        self.version_in_memory: int | None = None
        self.got_changes: list[bool] = []

    async def stage_policy(self, manifest: PolicyManifest, rendezvous: Rendezvous) -> None:
        order = order_of(manifest, rendezvous, LIMIT_S)
        assert order["base"] in (None, self.version_in_memory)
        self.got_changes.append(rendezvous.changes)
        self.receiver = PolicyReceiver(order, 1, CPU, self.held if rendezvous.changes else None)
        async with asyncio.timeout(LIMIT_S):
            while (report := self.receiver.report())["state"] == "receiving":
                await asyncio.sleep(0.005)
        if report["state"] == "failed":
            raise EngineError(report["reason"])

    async def load_staged(self, policy_version: int) -> float:
        assert self.receiver is not None
        if self.refuses_staged:
            raise EngineError("vLLM refused a call: no")
        self.loaded.append((policy_version, "memory"))
        self.held, self.version_in_memory = self.receiver, policy_version
        return 0.0

    async def load_policy(self, files: Sequence[Path], policy_version: int) -> float:
        assert all(file.is_file() for file in files)
        self.loaded.append((policy_version, "files"))
        self.held = self.version_in_memory = None
        return 0.0


@dataclass
class Rig:
    publisher: PolicyPublisher
    sender: PolicySender
    engine: ReceivingEngine
    policies: Policies
    metrics: GenerationMetrics
    offered: dict[int, StagedPolicy] = field(default_factory=dict)

    def publish(self, version: int, tensors: dict[str, Tensor] | None = None) -> PolicyManifest:
        policy = StagedPolicy(version, version, weights(version) if tensors is None else tensors)
        manifest = self.publisher.write(policy)
        self.sender.offer(policy, manifest)
        self.offered[version] = policy
        return manifest

    def count(self, result: FetchResult) -> float:
        name = "nouscoder_generation_policy_fetches_total"
        return self.metrics.registry.get_sample_value(name, {"result": result.value}) or 0.0


def config_of(folder: Path, transfer_name: str = "gloo") -> Config:
    settings = {"run.root": str(folder), "generation.engine": "vllm", "generation.vllm.weight_transfer": transfer_name}
    return load_config(None, [f'{name}="{value}"' for name, value in settings.items()])


@pytest.fixture(params=BY_TCP_OR_MEMORY)
async def rig(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    config = config_of(tmp_path, request.param)
    files = RunFiles.of(config)
    files.policies.mkdir(parents=True)
    sender, engine, metrics = PolicySender(config), ReceivingEngine(), GenerationMetrics()
    async with AsyncExitStack() as stack:
        server = grpc.aio.server(interceptors=[StatusCodes(STATUS_CODES, ["nouscoder.v1.LearnerService"])])
        servicer = LearnerServicer(cast(Any, None), 0, PolicyFiles(files), sender)
        learner_pb2_grpc.add_LearnerServiceServicer_to_server(servicer, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        stack.push_async_callback(server.stop, 0)
        client = await stack.enter_async_context(LearnerClient(address))
        policies = Policies(cast(Engine, engine), None, LearnerMemory(client, cast(Any, engine), metrics))
        yield Rig(publisher_in(files.policies, deltas=True), sender, engine, policies, metrics)
        await no_transfers()


async def no_transfers() -> None:
    """Wait for the threads of transfers, so that none outlives its test."""
    async with asyncio.timeout(LIMIT_S):
        while any(thread.name.startswith("policy-") for thread in threading.enumerate()):
            await asyncio.sleep(0.01)


async def test_a_policy_comes_from_memory_bit_for_bit(rig: Rig) -> None:
    """After the first, only the changes since the policy in use are sent."""
    for version in (0, 1, 2):
        assert await rig.policies.follow(rig.publish(version))
        assert rig.engine.receiver is not None
        found = rig.engine.receiver.tensors()
        assert found.keys() == weights(version).keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in weights(version).items())
        assert rig.engine.receiver.shapes()["matrix"] == [40, 30]
    assert rig.engine.loaded == [(0, "memory"), (1, "memory"), (2, "memory")]
    assert rig.engine.got_changes == [False, True, True]
    assert rig.count(FetchResult.FROM_MEMORY) == 3
    assert rig.count(FetchResult.NOT_FROM_MEMORY) == 0


async def test_an_engine_that_skipped_a_policy_gets_the_next_one_whole(rig: Rig) -> None:
    assert await rig.policies.follow(rig.publish(0))
    rig.publish(1)
    assert await rig.policies.follow(rig.publish(2))
    assert rig.engine.got_changes == [False, False]
    assert rig.engine.loaded == [(0, "memory"), (2, "memory")]


async def test_an_engine_whose_policy_came_from_files_gets_the_next_one_whole(rig: Rig) -> None:
    older = rig.publish(0)
    newer = rig.publish(1)
    assert await rig.policies.follow(older)
    assert await rig.policies.follow(newer)
    assert rig.engine.got_changes == [False]
    assert rig.engine.loaded == [(0, "files"), (1, "memory")]


async def test_changes_of_another_base_are_refused(rig: Rig) -> None:
    assert await rig.policies.follow(rig.publish(0))
    assert rig.engine.held is not None
    rig.engine.held._data[0][-1] += 1
    assert await rig.policies.follow(rig.publish(1))
    assert rig.engine.got_changes == [False, True]
    assert rig.engine.loaded == [(0, "memory"), (1, "files")]


async def test_a_late_receiver_takes_the_files_of_an_older_policy(rig: Rig) -> None:
    older = rig.publish(0)
    rig.publish(1)
    assert await rig.policies.follow(older)
    assert rig.engine.loaded == [(0, "files")]
    assert rig.count(FetchResult.NOT_FROM_MEMORY) == 1


async def test_values_that_are_not_those_of_the_files_are_refused(rig: Rig) -> None:
    manifest = rig.publish(3)
    rig.offered[3].weights["matrix"][5, 5] += 1
    assert await rig.policies.follow(manifest)
    assert rig.engine.loaded == [(3, "files")]
    assert rig.engine.receiver is not None
    assert "its manifest says" in rig.engine.receiver.report()["reason"]
    with pytest.raises(ValueError, match="not in memory, but failed"):
        rig.engine.receiver.tensors()


async def test_values_that_are_not_finite_are_refused(rig: Rig) -> None:
    tensors = weights(3)
    tensors["half"][0, 0] = float("inf")
    await rig.policies.follow(rig.publish(3, tensors))
    assert rig.engine.receiver is not None
    assert rig.engine.receiver.report()["reason"] == "half holds values that are not finite"


async def test_a_sender_that_leaves_in_the_middle_costs_one_transfer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = ShardImage.pieces

    def breaking(image: ShardImage, buffer: Tensor) -> Iterator[Tensor]:
        for number, piece in enumerate(pieces(image, buffer)):
            if number == 2:
                raise RuntimeError("the sender is gone")
            yield piece

    monkeypatch.setattr(ShardImage, "pieces", breaking)
    assert await rig.policies.follow(rig.publish(0))
    monkeypatch.setattr(ShardImage, "pieces", pieces)
    assert await rig.policies.follow(rig.publish(1))
    assert rig.engine.loaded == [(0, "files"), (1, "memory")]


async def test_a_transfer_that_is_too_slow_is_given_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides end by their own clocks, and the files are taken."""
    pieces = ShardImage.pieces

    def slow(image: ShardImage, buffer: Tensor) -> Iterator[Tensor]:
        for piece in pieces(image, buffer):
            time.sleep(0.2)
            yield piece

    monkeypatch.setattr(ShardImage, "pieces", slow)
    monkeypatch.setattr(rig.sender, "_limit_s", 0.3)
    assert await rig.policies.follow(rig.publish(0))
    assert rig.engine.loaded == [(0, "files")]


async def test_an_engine_that_cannot_load_what_it_staged_takes_the_files(rig: Rig) -> None:
    rig.engine.refuses_staged = True
    assert await rig.policies.follow(rig.publish(0))
    assert rig.engine.loaded == [(0, "files")]


async def test_without_memory_and_files_the_old_policy_stays(rig: Rig) -> None:
    assert await rig.policies.follow(rig.publish(0))
    gone = rig.publish(1)
    rig.publish(2)
    for shard in gone.shards:
        (Path(gone.folder) / shard.name).unlink()
    with pytest.raises(PolicyUnusable):
        await rig.policies.follow(gone)
    assert rig.policies.current is not None
    assert rig.policies.current.policy_version == 0


async def test_the_learner_limits_its_transfers(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Receivers that ask and never come hold a place until the limit of the rendezvous."""
    monkeypatch.setattr(group, "RENDEZVOUS_LIMIT_S", 2.0)
    manifest = rig.publish(0)
    for _ in range(8):
        rig.sender.begin(0, manifest.digest, 1)
    with pytest.raises(TooManyTransfers):
        rig.sender.begin(0, manifest.digest, 1)
    await no_transfers()
    assert await rig.policies.follow(manifest)
    assert rig.engine.loaded == [(0, "memory")]


@pytest.mark.parametrize("num_receivers", [0, 65])
def test_only_the_newest_policy_is_sent_and_only_to_an_engine(tmp_path: Path, num_receivers: int) -> None:
    sender = PolicySender(config_of(tmp_path))
    with pytest.raises(NotInMemory):
        sender.begin(0, "0" * 64, 1)
    policy, manifest = published(tmp_path, 0)
    sender.offer(policy, manifest)
    with pytest.raises(NotInMemory):
        sender.begin(0, "0" * 64, 1)
    with pytest.raises(NotInMemory, match="1 to 64 receivers"):
        sender.begin(0, manifest.digest, num_receivers)


def test_with_files_the_learner_keeps_no_policy_in_memory(tmp_path: Path) -> None:
    sender = PolicySender(config_of(tmp_path, "files"))
    policy, manifest = published(tmp_path, 0)
    sender.offer(policy, manifest)
    with pytest.raises(NotInMemory):
        sender.begin(0, manifest.digest, 1)
