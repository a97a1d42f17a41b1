"""Policies fetched from a learner: complete or not at all, within bounds, and newer ones in place of removed ones."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from safetensors.torch import load_file, save
from tests.contract.reference_logprobs import fresh_logprobs

from nouscoder.config import Config, RunSection
from nouscoder.domain.policy import PolicyDelta, PolicyManifest, Shard, Transport
from nouscoder.domain.rollout import Sampling
from nouscoder.domain.tokens import VersionSpan
from nouscoder.errors import Unusable
from nouscoder.generation.engines.base import SampleRequest
from nouscoder.generation.engines.fake import FakeEngine
from nouscoder.generation.engines.stepped import SteppedEngine
from nouscoder.generation.engines.torch import TorchEngine
from nouscoder.generation.metrics import GenerationMetrics
from nouscoder.generation.weights.cache import PolicyCache
from nouscoder.generation.weights.errors import PolicyGone, PolicyUnusable
from nouscoder.generation.weights.policies import Policies
from nouscoder.generation.weights.source import LearnerSource
from nouscoder.learner.publication.policy_files import CHUNK_BYTES, NoSuchPolicyFile, PolicyFiles
from nouscoder.learner.servicer import STATUS_CODES, LearnerServicer
from nouscoder.learner.state.run_files import RunFiles
from nouscoder.policy_folder.delta import write_delta
from nouscoder.policy_folder.weights_files import ADAPTER_FILE, shards_of
from nouscoder.rpc.channel import PeerUnreachable
from nouscoder.rpc.learner_client import LearnerClient
from nouscoder.rpc.status_codes import StatusCodes
from nouscoder.v1 import learner_pb2, learner_pb2_grpc

BIG = 2 * CHUNK_BYTES + 17


def weights(version: int, num_bytes: int = BIG) -> bytes:
    """Bytes that the fake engine accepts as weights."""
    return (8).to_bytes(8, "little") + bytes([version]) * (num_bytes - 8)


def manifest_of(version: int, data: bytes) -> PolicyManifest:
    shard = Shard("model.safetensors", hashlib.sha256(data).hexdigest(), len(data))
    # The folder is on the learner's disk, not on this machine.
    return PolicyManifest(version, version, "/no/such/folder", (shard,), Transport.LEARNER)


@dataclass
class FaultyServicer(LearnerServicer):
    """The learner's servicer, which sends a changed first or last piece a configured number of times, or hangs."""

    flip: int = 0
    cut: int = 0
    hangs: bool = False
    asked: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def __init__(self, files: PolicyFiles) -> None:
        super().__init__(None, 0, files, None)  # type: ignore[arg-type]
        self.asked = []
        self.names = []

    async def FetchPolicy(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.asked.append(request.policy_version)
        self.names.append(request.name)
        pieces = [answer.data async for answer in super().FetchPolicy(request, context)]
        assert all(len(piece) <= CHUNK_BYTES for piece in pieces)
        if self.flip:
            self.flip -= 1
            pieces[0] = bytes([pieces[0][0] ^ 1]) + pieces[0][1:]
        if self.cut:
            self.cut -= 1
            pieces.pop()
        if self.hangs:
            await asyncio.Event().wait()
        for piece in pieces:
            yield learner_pb2.FetchPolicyResponse(data=piece)


@dataclass
class Rig:
    files: RunFiles
    servicer: FaultyServicer
    server: Any
    cache_folder: Path
    cache: PolicyCache
    source: LearnerSource
    metrics: GenerationMetrics

    def publish(self, version: int, data: bytes | None = None) -> PolicyManifest:
        data = weights(version) if data is None else data
        file = self.files.policies / f"{version:08d}" / "model.safetensors"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        return manifest_of(version, data)

    def cached(self) -> list[str]:
        return sorted(path.name for path in self.cache_folder.iterdir() if path.name not in (".lock", "first"))

    def fetches(self, result: str) -> float:
        name = "nouscoder_generation_policy_fetches_total"
        return self.metrics.registry.get_sample_value(name, {"result": result}) or 0.0


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr("nouscoder.generation.weights.source._AGAIN_S", 0.01)
    files = RunFiles.of(Config(run=RunSection(root=tmp_path, name="run")))
    files.policy.mkdir(parents=True)
    (files.policy / "config.json").write_text('{"model_type": "qwen3"}')
    (files.policy / "tokenizer.json").write_text("{}")
    (files.policy / "model.safetensors").write_bytes(weights(0))
    (files.policy / "id_rsa").write_text("secret")
    (files.run / "config.toml").write_text("secret")
    metrics = GenerationMetrics()
    async with AsyncExitStack() as stack:
        servicer = FaultyServicer(PolicyFiles(files))
        server = grpc.aio.server(interceptors=[StatusCodes(STATUS_CODES, ["nouscoder.v1.LearnerService"])])
        learner_pb2_grpc.add_LearnerServiceServicer_to_server(servicer, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        stack.push_async_callback(server.stop, 0)
        client = await stack.enter_async_context(LearnerClient(address))
        cache = PolicyCache(tmp_path / "cache")
        stack.callback(cache.close)
        source = LearnerSource(client, cache, metrics, patience_s=0.5)
        yield Rig(files, servicer, server, tmp_path / "cache", cache, source, metrics)


async def test_the_policy_folder_is_fetched_without_its_weights_and_no_other_file_can_be_fetched(rig: Rig) -> None:
    folder = await rig.source.first_folder()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: (rig.files.policy / name).read_bytes() for name in ("config.json", "tokenizer.json")
    }
    handed_out = PolicyFiles(rig.files)
    assert [file.name for file in handed_out.first()] == ["config.json", "model.safetensors", "tokenizer.json"]
    for name in ("id_rsa", "../config.toml", "..", "", "/etc/passwd", "config.json/", "./config.json", "config.json\0"):
        with pytest.raises(NoSuchPolicyFile):
            handed_out.open_first(name)


async def test_weights_are_fetched_once_and_the_newest_two_are_kept(rig: Rig) -> None:
    manifests = [rig.publish(version) for version in range(1, 5)]
    for manifest in manifests:
        (path,) = await rig.source.files_of(manifest)
        assert path.read_bytes() == weights(manifest.policy_version)
        assert await rig.source.files_of(manifest) == (path,)
    assert rig.servicer.asked == [1, 2, 3, 4]
    assert [name.partition("-")[0] for name in rig.cached()] == ["00000003", "00000004"]
    assert rig.fetches("fetched") == 4
    assert rig.metrics.registry.get_sample_value("nouscoder_generation_policy_fetch_seconds_count") == 4


async def test_the_first_policy_is_fetched_before_the_learner_has_published_it(rig: Rig) -> None:
    (path,) = await rig.source.files_of(manifest_of(0, weights(0)))
    assert path.read_bytes() == weights(0)


@pytest.mark.parametrize("fault", ["flip", "cut"])
async def test_a_wrong_transfer_is_retried_a_few_times_and_leaves_no_file(rig: Rig, fault: str) -> None:
    manifest = rig.publish(1)
    setattr(rig.servicer, fault, 2)
    (path,) = await rig.source.files_of(manifest)
    assert path.read_bytes() == weights(1)
    assert len(rig.servicer.asked) == 3

    other = rig.publish(2)
    setattr(rig.servicer, fault, 99)
    with pytest.raises(PolicyUnusable, match=r"model\.safetensors has "):
        await rig.source.files_of(other)
    assert len(rig.servicer.asked) == 6
    assert [name.partition("-")[0] for name in rig.cached()] == ["00000001"]
    assert rig.fetches("failed") == 1


async def test_a_kept_file_that_was_damaged_is_fetched_again(rig: Rig) -> None:
    manifest = rig.publish(1)
    (path,) = await rig.source.files_of(manifest)
    path.write_bytes(path.read_bytes()[:-1])
    (path,) = await rig.source.files_of(manifest)
    assert path.read_bytes() == weights(1)
    assert rig.servicer.asked == [1, 1]


async def test_only_missing_shards_of_a_policy_are_fetched(rig: Rig) -> None:
    folder = rig.files.policies / "00000001"
    folder.mkdir(parents=True)
    names = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(weights(number, 100))
    weight_map = {str(number): name for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    manifest = PolicyManifest(1, 1, "/no/such/folder", shards_of(folder), Transport.LEARNER)
    (folder / names[2]).rename(folder / "away")
    with pytest.raises(PolicyGone, match=names[2]):
        await rig.source.files_of(manifest)
    (folder / "away").rename(folder / names[2])
    files = await rig.source.files_of(manifest)
    assert [file.read_bytes() for file in files] == [weights(number, 100) for number in range(3)]
    assert rig.servicer.names == [*names, names[2]]


def published_changes(rig: Rig, base: PolicyManifest, version: int) -> PolicyManifest:
    """A version with its delta from `base`."""
    folder = rig.files.policies / f"{version:08d}"
    manifest = rig.publish(version, weights(version, BIG + 1))
    before = rig.files.policies / f"{base.policy_version:08d}" / "model.safetensors"
    write_delta(before, folder / "model.safetensors", folder / "model.delta")
    data = (folder / "model.delta").read_bytes()
    assert len(data) < BIG / 10
    file = Shard("model.delta", hashlib.sha256(data).hexdigest(), len(data))
    return replace(manifest, delta=PolicyDelta(base.policy_version, base.digest, (file,)))


async def test_only_the_changes_are_fetched_where_the_policy_before_is_here(rig: Rig) -> None:
    manifest = rig.publish(1, weights(1, BIG + 1))
    await rig.source.files_of(manifest)
    for version in (2, 3):
        manifest = published_changes(rig, manifest, version)
        (path,) = await rig.source.files_of(manifest)
        assert path.read_bytes() == weights(version, BIG + 1)
        assert [file.name for file in path.parent.iterdir()] == ["model.safetensors"]
    # Version 4 was skipped, as by a worker that comes late.
    late = published_changes(rig, published_changes(rig, manifest, 4), 5)
    (path,) = await rig.source.files_of(late)
    assert path.read_bytes() == weights(5, BIG + 1)
    assert rig.servicer.names == ["model.safetensors", "model.delta", "model.delta", "model.safetensors"]
    assert (rig.fetches("fetched"), rig.fetches("changes")) == (2, 2)


@pytest.mark.parametrize("fault", ["damaged on the way", "a changed base", "gone"])
async def test_a_delta_that_does_not_give_the_policy_is_replaced_by_the_whole_one(rig: Rig, fault: str) -> None:
    first = rig.publish(1, weights(1, BIG + 1))
    (base,) = await rig.source.files_of(first)
    manifest = published_changes(rig, first, 2)
    if fault == "damaged on the way":
        rig.servicer.flip = 1
    elif fault == "a changed base":
        base.write_bytes(weights(9, BIG + 1))
    else:
        (rig.files.policies / "00000002" / "model.delta").unlink()
    (path,) = await rig.source.files_of(manifest)
    assert path.read_bytes() == weights(2, BIG + 1)
    assert [file.name for file in path.parent.iterdir()] == ["model.safetensors"]
    assert rig.servicer.names == ["model.safetensors", "model.delta", "model.safetensors"]
    assert rig.fetches("changes") == 0


def published_adapter(rig: Rig, version: int) -> PolicyManifest:
    """An adapter of the first policy."""
    data = weights(version, 100)
    file = rig.files.policies / f"{version:08d}" / ADAPTER_FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    shard = Shard(file.name, hashlib.sha256(data).hexdigest(), len(data))
    base = manifest_of(0, weights(0))
    return PolicyManifest(version, version, "/no/such/folder", (shard,), Transport.LEARNER, base=base)


async def test_the_base_of_adapters_is_fetched_once_and_kept_and_each_adapter_alone(rig: Rig) -> None:
    await rig.source.files_of(manifest_of(0, weights(0)))  # the first evaluation measures the whole policy
    for version in range(5):
        base, adapter = await rig.source.files_of(published_adapter(rig, version))
        assert (base.read_bytes(), adapter.read_bytes()) == (weights(0), weights(version, 100))
    assert rig.servicer.names == ["model.safetensors", *[ADAPTER_FILE] * 5]
    assert [name.partition("-")[0] for name in rig.cached()] == ["00000000", "00000003", "00000004"]
    base.write_bytes(weights(9))
    base, _ = await rig.source.files_of(published_adapter(rig, 5))
    assert base.read_bytes() == weights(0), "a base that was damaged is fetched again"
    assert rig.servicer.names[6:] == ["model.safetensors", ADAPTER_FILE]


async def test_a_worker_that_comes_late_needs_the_base_and_the_newest_adapter(rig: Rig) -> None:
    manifests = [published_adapter(rig, version) for version in range(8)]
    base, adapter = await rig.source.files_of(manifests[-1])
    assert (base.read_bytes(), adapter.read_bytes()) == (weights(0), weights(7, 100))
    assert rig.servicer.asked == [0, 7]
    (rig.files.policy / "model.safetensors").write_bytes(weights(1))
    base.unlink()
    with pytest.raises(PolicyGone, match="of policy version 0 with the SHA-256"):
        await rig.source.files_of(manifests[-1])


async def test_a_pruned_or_replaced_policy_is_reported_as_gone_without_a_retry(rig: Rig) -> None:
    with pytest.raises(PolicyGone, match="of policy version 7 with the SHA-256"):
        await rig.source.files_of(manifest_of(7, weights(7)))
    rig.publish(7)
    with pytest.raises(PolicyGone):
        await rig.source.files_of(manifest_of(7, weights(8)))
    assert rig.servicer.asked == [7, 7]
    assert rig.fetches("gone") == 2


async def test_an_unreachable_learner_is_retried_for_a_limited_time(rig: Rig) -> None:
    manifest = rig.publish(1)
    await rig.server.stop(0)
    with pytest.raises(PolicyUnusable, match=r"policy version 1 cannot be fetched: .* did not arrive within 0 s"):
        await rig.source.files_of(manifest)
    with pytest.raises(PeerUnreachable, match="the policy's files did not arrive within 0 s"):
        await rig.source.first_folder()


async def make_fault(
    rig: Rig, fault: str, data: bytes, shape: bytes, monkeypatch: pytest.MonkeyPatch
) -> PolicyManifest:
    """Publish version 2 with a fault. `shape` are its weights with a wrong shape."""
    if fault == "truncated shard":
        return rig.publish(2, data[:-100])
    if fault == "wrong shape":
        return rig.publish(2, shape)
    if fault == "wrong checksum":
        rig.servicer.flip = 99
    elif fault == "dead publisher":
        rig.servicer.hangs = True
    elif fault == "no disk":
        opened = Path.open

        def without_room(path: Path, *arguments: Any, **named: Any) -> Any:
            return opened(Path("/dev/full") if path.suffix == ".part" else path, *arguments, **named)

        monkeypatch.setattr(Path, "open", without_room)
    return rig.publish(2, data)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("truncated shard", "holds no readable weights"),
        ("wrong checksum", "has the SHA-256"),
        ("wrong shape", "has shape"),
        ("dead publisher", "did not arrive within"),
        ("no disk", "cannot be written: No space left on device"),
    ],
)
async def test_a_failing_update_leaves_the_old_version_serving(
    rig: Rig,
    tmp_path: Path,
    random_policy: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    says: str,
) -> None:
    """Requests run before, during and after it, and have the log-probabilities of the old weights."""
    folder, other = (random_policy(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    data = (other / "model.safetensors").read_bytes()
    tensors = load_file(other / "model.safetensors")
    shape = save(tensors | {"model.norm.weight": tensors["model.norm.weight"][1:]})
    requests = [
        SampleRequest(f"r{n}", (1, 5 + n, 9), Sampling(max_new_tokens=40, seed=n + 1), frozenset()) for n in range(9)
    ]
    async with SteppedEngine(TorchEngine(folder, max_running=4, max_tokens_total=60), rig.metrics) as engine:
        policies = Policies(engine, rig.source)
        await policies.update(rig.publish(1, (folder / "model.safetensors").read_bytes()))
        before = [engine.sample(request) for request in requests[:8]]
        with monkeypatch.context() as faulty:
            updating = asyncio.create_task(policies.follow(await make_fault(rig, fault, data, shape, faulty)))
            if fault == "dead publisher":
                while 2 not in rig.servicer.asked:
                    await asyncio.sleep(0.01)
                await rig.server.stop(0)
            with pytest.raises(PolicyUnusable, match=says):
                await updating
        after = engine.sample(requests[8])
        completions = await asyncio.wait_for(asyncio.gather(*before, after), 120)
        assert (engine.policy_version, engine.paused) == (1, False)
        if fault != "dead publisher":
            rig.servicer.flip = 0
            await policies.follow(rig.publish(3, data))
            assert engine.policy_version == 3
    for request, completion in zip(requests, completions, strict=True):
        assert completion.versions == (VersionSpan(1, 40),)
        assert list(completion.logprobs) == pytest.approx(
            fresh_logprobs(folder, request, completion).tolist(), abs=1e-4
        )


async def test_the_engine_loads_fetched_weights(rig: Rig) -> None:
    async with SteppedEngine(FakeEngine(max_running=2, max_tokens_total=100), rig.metrics) as engine:
        policies = Policies(engine, rig.source)
        await policies.update(rig.publish(3))
        assert engine.policy_version == 3
        # Older ones are not even fetched.
        assert await policies.follow(rig.publish(2)) is False
        assert rig.servicer.asked == [3]


def test_a_cache_belongs_to_one_process_and_starts_without_partial_files(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "00000001-aa").mkdir()
    for ending in ("part", "delta", "delta.part"):
        (folder / f"00000001-aa/model.safetensors.{ending}").write_bytes(b"half")
    cache = PolicyCache(folder)
    assert [path.name for path in folder.rglob("*") if path.is_file()] == [".lock"]
    with pytest.raises(Unusable, match=r"another process uses generation\.cache"):
        PolicyCache(folder)
    cache.close()
    PolicyCache(folder).close()


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unusable, match=r"generation\.cache .* cannot be written: Not a directory"):
        PolicyCache(tmp_path / "file" / "cache")
