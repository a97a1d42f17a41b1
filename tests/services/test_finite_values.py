"""The values of policies are checked without a call for each tensor, and none that is not finite is missed."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from nouscoder.domain.policy import PolicyManifest, Shard
from nouscoder.generation.engines.architecture import Architecture
from nouscoder.generation.engines.base import EngineError
from nouscoder.generation.weights import cache as cache_module
from nouscoder.generation.weights.cache import PolicyCache
from nouscoder.policy_folder import finite_values
from nouscoder.policy_folder.finite_values import not_finite_in, not_finite_in_file
from nouscoder.policy_folder.weights_files import LENGTH_BYTES, TensorSpan, WeightsUnusable, header_length, spans_of

DTYPES = {torch.float64: 64, torch.float32: 32, torch.bfloat16: 16, torch.float16: 16}


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations."""

    number = 0

    def __torch_dispatch__(self, function: Any, _types: Any, arguments: Any = (), options: Any = None) -> Any:
        """Count, then do it."""
        self.number += 1
        return function(*arguments, **(options or {}))


def test_the_check_of_a_policy_calls_torch_for_none_of_its_tensors(
    random_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Beside a busy event loop each call waits 5 ms for Python's lock: of 310 tensors they took 12 to 15 s."""
    folder = random_policy(tmp_path)
    architecture = Architecture(folder)
    with Counted() as counted:  # type: ignore[no-untyped-call]
        architecture.check([folder / "model.safetensors"], "a policy")
    assert counted.number == 0


def test_the_number_of_calls_follows_from_the_bytes_and_not_from_the_number_of_tensors(tmp_path: Path) -> None:
    many = {f"w{i:04}": torch.ones(64, dtype=torch.bfloat16) for i in range(1000)}
    save_file(many, file := tmp_path / "many.safetensors")
    data = np.fromfile(file, np.uint8)
    begin = LENGTH_BYTES + header_length(data[:LENGTH_BYTES].tobytes())
    pieces = []

    def piece(start: int, end: int) -> finite_values.Bytes:
        pieces.append(end - start)
        return data[begin + start : begin + end]

    assert not_finite_in(spans_of(data[LENGTH_BYTES:begin].tobytes()), piece) is None
    assert pieces == [2 * 64 * 1000]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 7, 8, 20])
def test_a_value_that_is_not_finite_is_found_by_the_name_of_its_tensor(
    tmp_path: Path, dtype: torch.dtype, value: float, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also across the pieces, and between neighbours of the largest and smallest numbers of the type."""
    monkeypatch.setattr(finite_values, "PIECE_BYTES", 32)
    about = torch.finfo(dtype)
    numbers = torch.tensor([about.max, about.min, about.tiny, 0.0, -0.0, about.smallest_normal / 2, 1.0], dtype=dtype)
    tensors = {"a": numbers.clone(), "b": numbers.clone(), "c": numbers.clone(), "d": torch.empty(0, 3, dtype=dtype)}
    tensors["mask"] = torch.ones(3, dtype=torch.bool)
    tensors["positions"] = torch.full((4,), 2**63 - 1)
    tensors["other"] = torch.ones(5, dtype=torch.float16 if dtype is not torch.float16 else torch.float32)
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    assert not_finite_in_file(file) is None
    name = "abc"[place // 7]
    tensors[name][place % 7] = value
    save_file(tensors, file)
    assert not_finite_in_file(file) == name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits_is_judged_as_torch_judges_it(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    name = {torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    words = every.view(torch.uint8).numpy()
    for k, is_finite in enumerate(torch.isfinite(every).tolist()):
        span = TensorSpan("w", name, (1,), 0, 2)
        found = not_finite_in([span], lambda _start, _end, k=k: words[2 * k : 2 * k + 2])  # type: ignore[misc]
        assert (found is None) == is_finite, k


@pytest.mark.parametrize("num_bytes", [0, 7, 8, 60, -1])
def test_a_file_that_is_not_whole_is_refused_by_its_name(tmp_path: Path, num_bytes: int) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(save({"w": torch.ones(100)})[:num_bytes])
    with pytest.raises(WeightsUnusable, match=re.escape(f"{file} is not a whole safetensors file")):
        not_finite_in_file(file)


def test_a_policy_is_refused_by_the_name_of_the_bad_tensor(random_policy: Callable[..., Path], tmp_path: Path) -> None:
    folder = random_policy(tmp_path)
    architecture = Architecture(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(EngineError, match=r"^a policy: model\.norm\.weight holds values that are not finite$"):
        architecture.check([folder / "model.safetensors"], "a policy")


async def test_a_fetched_file_is_written_with_few_calls_in_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them waits for Python's lock: 1,135 pieces of 1 MiB of a 0.6B policy were 2,270 calls."""
    calls, to_thread = [], asyncio.to_thread

    async def counted(function: Any, *arguments: Any) -> Any:
        calls.append(function)
        return await to_thread(function, *arguments)

    monkeypatch.setattr(asyncio, "to_thread", counted)
    monkeypatch.setattr(cache_module, "_WRITTEN_BYTES", 1000)
    data = bytes(range(256)) * 12

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 10):
            yield data[start : start + 10]

    cache = PolicyCache(tmp_path / "cache")
    shard = Shard("model.safetensors", hashlib.sha256(data).hexdigest(), len(data))
    (path,) = cache.paths_of(PolicyManifest(1, 1, "", (shard,)))
    await cache.keep_shard(path, shard, pieces())
    cache.close()
    assert (path.read_bytes(), len(calls)) == (data, 4)


def test_a_tensor_that_no_model_reads_may_hold_anything(tmp_path: Path) -> None:
    """It lies between two others of its type, which are then no neighbours."""
    file = tmp_path / "model.safetensors"
    unread = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors = {"model.a": torch.ones(5), unread: torch.full((3,), float("nan")), "model.z": torch.ones(2)}
    save_file(tensors, file)
    assert not_finite_in_file(file) is None
    tensors["model.z"][1] = float("inf")
    save_file(tensors, file)
    assert not_finite_in_file(file) == "model.z"
