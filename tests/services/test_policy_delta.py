"""Deltas of weights: applied to their base they give the other file, byte for byte, or they are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from nouscoder.atomic_files import StorageError
from nouscoder.domain.policy import PolicyDelta, PolicyManifest, Shard
from nouscoder.learner.parallel.ranks import RankLost, Ranks
from nouscoder.learner.publication.by_ranks import Rows, write_own_rows
from nouscoder.learner.publication.publisher import PolicyPublisher, StagedPolicy
from nouscoder.policy_folder import delta as module
from nouscoder.policy_folder.delta import DeltaUnusable, apply_delta, change, write_delta
from nouscoder.rpc.pairs import MANIFEST

NUM_VERSIONS = 50


def assembled(folder: Path, base: bytes, new: bytes) -> tuple[bytes, bytes]:
    """What the delta of the two makes of the first, and the delta."""
    (folder / "base").write_bytes(base)
    (folder / "new").write_bytes(new)
    write_delta(folder / "base", folder / "new", folder / "delta")
    apply_delta(folder / "base", folder / "delta", folder / "made")
    made, delta = (folder / "made").read_bytes(), (folder / "delta").read_bytes()
    in_place = np.frombuffer(bytearray(base), dtype=np.uint8)
    change(in_place, delta, "delta")
    assert in_place.tobytes() == made
    return made, delta


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.integers(0, 1500),
    share=st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**32 - 1),
    block=st.sampled_from([1, 7, 600, 2**22]),
)
def test_any_two_files_of_one_size_come_back(tmp_path: Path, size: int, share: float, seed: int, block: int) -> None:
    random = np.random.default_rng(seed)
    base = random.integers(0, 2**16, size, dtype=np.uint16)
    new = np.where(random.random(size) < share, random.integers(0, 2**16, size, dtype=np.uint16), base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK_WORDS", block)
        assert assembled(tmp_path, base.tobytes(), new.tobytes())[0] == new.tobytes()


def test_a_change_far_from_the_one_before_and_at_both_ends(tmp_path: Path) -> None:
    base = np.zeros(100_000, dtype=np.uint16)
    new = base.copy()
    new[[0, 1, 255, 510, 99_999]] = [1, 65_535, 7, 256, 32_768]
    made, delta = assembled(tmp_path, base.tobytes(), new.tobytes())
    assert made == new.tobytes()
    assert len(delta) < 200


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_delta_is_refused_or_gives_other_bytes(tmp_path: Path, data: st.DataObject) -> None:
    random = np.random.default_rng(1)
    base = random.integers(0, 2**16, 500, dtype=np.uint16)
    new = np.where(random.random(500) < 0.1, base + np.uint16(1), base)
    _, good = assembled(tmp_path, base.tobytes(), new.tobytes())
    place = data.draw(st.integers(0, len(good) - 1))
    cut = data.draw(st.booleans())
    bad = (
        good[:place]
        if cut
        else good[:place] + bytes([good[place] ^ data.draw(st.integers(1, 255))]) + good[place + 1 :]
    )
    (tmp_path / "delta").write_bytes(bad)
    try:
        apply_delta(tmp_path / "base", tmp_path / "delta", tmp_path / "made")
    except DeltaUnusable:
        return
    # A bit that zstd does not use may be flipped without effect; otherwise the checksum of the policy tells.
    assert not cut
    assert len((tmp_path / "made").read_bytes()) == len(new.tobytes())


def test_files_of_different_sizes_have_no_delta(tmp_path: Path) -> None:
    (tmp_path / "base").write_bytes(bytes(6))
    (tmp_path / "new").write_bytes(bytes(8))
    with pytest.raises(DeltaUnusable, match="has 8 bytes, and its base"):
        write_delta(tmp_path / "base", tmp_path / "new", tmp_path / "delta")


def random_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layer{index}": 0.02 * torch.randn(64, 96, generator=generator) for index in range(4)}


def staged(version: int, weights: dict[str, torch.Tensor]) -> StagedPolicy:
    return StagedPolicy(version, version, {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()})


def test_fifty_versions_in_a_row_made_from_their_deltas_equal_the_published_ones(tmp_path: Path) -> None:
    """The masters are float32, and each version moves every one of them by 1e-5 up or down."""
    generator = torch.Generator().manual_seed(1)
    publisher = PolicyPublisher(tmp_path / "policies", keep=2, shard_bytes=30_000, deltas=True)
    weights = random_weights()
    first = publisher.write(staged(0, weights))
    assert first.delta is None
    assert len(first.shards) == 2
    receiver = tmp_path / "receiver"
    shutil.copytree(first.folder, receiver)
    before = first
    for version in range(1, NUM_VERSIONS + 1):
        for tensor in weights.values():
            tensor += 1e-5 * torch.randn(tensor.shape, generator=generator).sign()
        manifest = publisher.write(staged(version, weights))
        assert manifest.delta is not None
        assert (manifest.delta.base_version, manifest.delta.base_digest) == (version - 1, before.digest)
        for shard, file in zip(manifest.shards, manifest.delta.files, strict=True):
            apply_delta(receiver / shard.name, Path(manifest.folder) / file.name, tmp_path / "made")
            (tmp_path / "made").replace(receiver / shard.name)
            assert (receiver / shard.name).read_bytes() == (Path(manifest.folder) / shard.name).read_bytes()
        assert sum(file.num_bytes for file in manifest.delta.files) < 0.25 * manifest.num_bytes
        before = manifest


def rows_of(weights: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, Rows]:
    """The rows that FSDP gives a rank: equal numbers, and fewer for the last."""
    found = {}
    for name, tensor in weights.items():
        whole = tensor if tensor.ndim else tensor.reshape(1)
        most = -(-len(whole) // size)
        part = whole[most * rank : most * (rank + 1)].contiguous()
        if part.numel():
            found[name] = Rows(most * rank * whole[0].nbytes, part.reshape(-1).view(torch.uint8).numpy())
    return found


@pytest.mark.parametrize("size", [2, 3, 7])
def test_a_version_that_all_ranks_write_has_the_bytes_of_one_that_rank_0_gathered(tmp_path: Path, size: int) -> None:
    def weights(version: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        named = {"a": (5, 6), "b": (33,), "c": (3, 4, 2), "d": (40, 3), "scale": ()}
        made = {name: torch.randn(shape, generator=generator) for name, shape in named.items()}
        chance = torch.Generator().manual_seed(version)
        moved = {name: tensor + 1e-3 * torch.randn(tensor.shape, generator=chance) for name, tensor in made.items()}
        return {name: tensor if name in "bd" else tensor.bfloat16() for name, tensor in moved.items()}

    gathered, by_ranks = (
        PolicyPublisher(tmp_path / name, keep=3, shard_bytes=500, deltas=True) for name in ("gathered", "by_ranks")
    )
    ranks = Ranks(0, size, HashStore(), None, None, patience_s=60.0)
    assert by_ranks.begin_by_ranks(1, ranks, lambda _files: True) is None, "nothing was written before"
    for version in range(3):
        expected = gathered.write(StagedPolicy(version, version, weights(version)))
        if version == 0:
            by_ranks.write(StagedPolicy(0, 0, weights(0)))
            continue
        made = by_ranks.begin_by_ranks(version, ranks, lambda _files: True)
        assert made is not None
        assert ranks.store is not None
        made.rows = rows_of(weights(version), 0, size)
        for rank in range(1, size):
            write_own_rows(rows_of(weights(version), rank, size), made.before[0].parent, made.folder, rank, ranks.store)
        manifest = by_ranks.write(StagedPolicy(version, version, {}, by_ranks=made))
        assert len(manifest.shards) > 1
        assert (manifest.digest, manifest.delta) == (expected.digest, expected.delta)
        files, same = (
            {file.name: file.read_bytes() for file in Path(each.folder).iterdir()} for each in (manifest, expected)
        )
        assert files == same


def test_a_rank_that_cannot_write_its_part_leaves_no_version(tmp_path: Path) -> None:
    publisher = PolicyPublisher(tmp_path, keep=3, deltas=True)
    publisher.write(staged(0, random_weights()))
    ranks = Ranks(0, 2, HashStore(), None, None, patience_s=60.0)
    made = publisher.begin_by_ranks(1, ranks, lambda _files: True)
    assert made is not None
    assert ranks.store is not None
    ranks.store.set(f"{made.folder.name}/1", "Permission denied")
    with pytest.raises(
        StorageError, match="rank 1 of the learner could not write its part of a policy: Permission denied"
    ):
        publisher.write(StagedPolicy(1, 1, {}, by_ranks=made))
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["00000000"]
    late = publisher.begin_by_ranks(1, Ranks(0, 2, HashStore(), None, None, patience_s=0.01), lambda _files: True)
    with pytest.raises(RankLost, match="rank 1 of the learner did not write its part of a policy within 0 s"):
        publisher.write(StagedPolicy(1, 1, {}, by_ranks=late))


def test_a_version_without_a_base_of_the_same_files_has_no_delta(tmp_path: Path) -> None:
    weights = random_weights()
    PolicyPublisher(tmp_path, keep=3, deltas=True).write(staged(0, weights))
    restarted = PolicyPublisher(tmp_path, keep=3, deltas=True)
    assert restarted.write(staged(1, weights)).delta is None, "this process has not written version 0"
    fewer = dict([*weights.items()][1:])
    assert restarted.write(staged(2, fewer)).delta is None, "the files have other sizes"
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["model.safetensors"] * 3
    assert restarted.write(staged(3, fewer)).delta is not None
    (tmp_path / "00000003" / "model.safetensors").unlink()
    assert restarted.write(staged(4, fewer)).delta is None, "the base is gone"
    assert PolicyPublisher(tmp_path, keep=3).write(staged(5, fewer)).delta is None, "no deltas are asked for"


def test_a_delta_is_part_of_the_manifest_and_not_of_its_digest() -> None:
    shard, file = Shard("model.safetensors", "a" * 64, 8), Shard("model.delta", "b" * 64, 3)
    whole = PolicyManifest(5, 20, "/there", (shard,))
    manifest = PolicyManifest(5, 20, "/there", (shard,), delta=PolicyDelta(4, "c" * 64, (file,)))
    assert MANIFEST.decode(MANIFEST.encode(manifest)) == manifest
    assert MANIFEST.decode(MANIFEST.encode(whole)) == whole
    assert manifest.digest == whole.digest
    with pytest.raises(ValueError, match="the delta of policy version 5 has not one file for each shard"):
        PolicyManifest(5, 20, "/there", (shard,), delta=PolicyDelta(4, "c" * 64, (file, file)))
