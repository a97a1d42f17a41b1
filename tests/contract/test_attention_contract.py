"""The contract of every attention of the learner: each sequence of a row as alone, in values and gradients.

The kernels of torch and flash-attention run where a CUDA device is; elsewhere loops that check the arguments take the
place of their functions. A test that is skipped says what is missing.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.contract.reference_varlen import attention_in_loops, flash_attn_varlen_func, varlen_attn_on_cpu
from torch import Tensor, nn
from transformers import AttentionInterface

from nouscoder.config import Attention
from nouscoder.learner.model import attention, kernels
from nouscoder.learner.model.attention import chosen, use_attention, why_not
from nouscoder.learner.model.kernels import FA2_VARLEN, SDPA_VARLEN, TORCH_VARLEN, head_groups
from nouscoder.learner.model.packed_attention import PACKED_ATTENTION, RowLayout, Segments
from nouscoder.learner.model.synthetic import random_policy

FUNCTIONS: Any = AttentionInterface._global_mapping
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LENGTHS = (5, 1, 9, 3)
HEADS, KEY_HEADS, SIZE = 4, 2, 8
KINDS = {TORCH_VARLEN: Attention.VARLEN, FA2_VARLEN: Attention.FLASH}


@dataclass(frozen=True)
class Backend:
    """An attention function by name, where and in which type it runs, and how exact it is."""

    name: str
    device: torch.device
    dtype: torch.dtype
    limit: float


EXACT = [Backend(name, CPU, torch.float64, 1e-12) for name in (PACKED_ATTENTION, SDPA_VARLEN, TORCH_VARLEN, FA2_VARLEN)]
# Of 8 bits of a bfloat16's fraction, rounding of inputs, weights and outputs costs about two.
ON_GPU = [Backend(name, CUDA, torch.bfloat16, 2e-2) for name in (PACKED_ATTENTION, TORCH_VARLEN, FA2_VARLEN)]


@pytest.fixture(params=EXACT + ON_GPU, ids=lambda backend: f"{backend.name}-{backend.device.type}")
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    found: Backend = request.param
    if found.device is CPU:
        monkeypatch.setattr("nouscoder.learner.model.kernels.varlen_attn", varlen_attn_on_cpu)
        monkeypatch.setitem(sys.modules, "flash_attn", flash_attn_in_loops())
    elif not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    elif found.name in KINDS and (reason := why_not(KINDS[found.name], CUDA, found.dtype, SIZE)):
        pytest.skip(reason)
    return found


def flash_attn_in_loops() -> ModuleType:
    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    return module


class Layer(nn.Module):
    """What an attention function reads of a layer."""

    num_key_value_groups = HEADS // KEY_HEADS
    is_causal = True


@dataclass(frozen=True)
class PartOfRow:
    """A layout in which only some of the row's queries are here, with the keys of all before them."""

    segments: Segments

    def keys_and_values(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key, value


def inputs(backend: Backend, num_queries: int, num_keys: int) -> list[Tensor]:
    """Query, key, value [1, heads, tokens, size] as a layer has them: a view of [1, tokens, heads, size]."""
    random = torch.Generator().manual_seed(0)
    shapes = ((num_queries, HEADS), (num_keys, KEY_HEADS), (num_keys, KEY_HEADS))
    drawn = [torch.randn(1, *shape, SIZE, generator=random, dtype=torch.float64) for shape in shapes]
    return [one.to(backend.device, backend.dtype).transpose(1, 2).requires_grad_() for one in drawn]


def difference(one: Tensor, other: Tensor) -> float:
    return float((one.double().cpu() - other).abs().max())


def check(
    backend: Backend,
    layout: object,
    ends: tuple[list[int], list[int]],
    scaling: float | None = None,
    sliding_window: int | None = None,
) -> None:
    """The output, and the gradients of a weighted sum of it, are those of the loops in float64."""
    given = inputs(backend, ends[0][-1], ends[1][-1])
    attend = FUNCTIONS[backend.name]
    output, _none = attend(Layer(), *given, None, layout=layout, scaling=scaling, sliding_window=sliding_window)
    exact = [one.detach().double().cpu().requires_grad_() for one in given]
    q, k, v = (one[0].transpose(0, 1) for one in exact)
    expected = attention_in_loops(q, k, v, ends, scaling, sliding_window)
    assert output.shape == (1, ends[0][-1], HEADS, SIZE)
    assert difference(output[0].detach(), expected.detach()) < backend.limit
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad((weights.to(output) * output[0]).sum(), given)
    for one, other in zip(gradients, torch.autograd.grad((weights * expected).sum(), exact), strict=True):
        assert difference(one, other) < 4 * backend.limit


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_each_sequence_attends_to_itself_only_and_to_no_later_token(
    backend: Backend, scale: float | None, window: int | None
) -> None:
    ends = [*accumulate(LENGTHS)]
    check(backend, RowLayout.of(LENGTHS, backend.device), (ends, ends), scaling=scale, sliding_window=window)


@pytest.mark.parametrize("window", [None, 4])
def test_the_last_of_fewer_queries_attends_to_the_last_key(backend: Backend, window: int | None) -> None:
    """As where several processes hold parts of a row."""
    if backend.name == PACKED_ATTENTION:
        pytest.skip("blocks of padded sequences have as many queries as keys")
    queries, keys = (2, 3, 1), (2, 7, 5)
    layout = PartOfRow(Segments.of(queries, keys, backend.device))
    check(backend, layout, ([*accumulate(queries)], [*accumulate(keys)]), sliding_window=window)


def test_without_a_layout_each_row_is_one_sequence(backend: Backend) -> None:
    given = inputs(backend, 6, 6)
    attend = FUNCTIONS[backend.name]
    output, _none = attend(Layer(), *given, None, sliding_window=3)
    q, k, v = (one[0].transpose(0, 1).double().cpu() for one in given)
    expected = attention_in_loops(q, k, v, ([6], [6]), None, 3)
    assert difference(output[0].detach(), expected.detach()) < backend.limit


def test_heads_in_several_calls_of_the_kernel_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the backward pass would leave processors of a GPU without work."""
    monkeypatch.setattr("nouscoder.learner.model.kernels.varlen_attn", varlen_attn_on_cpu)
    monkeypatch.setattr("nouscoder.learner.model.kernels._head_groups", lambda query, *_: (2, 2))
    ends = [*accumulate(LENGTHS)]
    check(EXACT[2], RowLayout.of(LENGTHS, CPU), (ends, ends))


def test_head_groups_give_all_processors_work() -> None:
    assert head_groups(1, 32, 4, 132) == (12, 12, 4, 4)
    assert head_groups(8, 32, 4, 132) == (32,), "enough sequences"
    for sequences in range(1, 12):
        for heads_a_key in (1, 2, 4, 8):
            groups = head_groups(sequences, 32, heads_a_key, 132)
            assert sum(groups) == 32
            assert not any(size % heads_a_key for size in groups)


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))


@pytest.mark.usefixtures("flash_attn")
def test_auto_takes_the_best_that_runs() -> None:
    assert chosen(Attention.AUTO, CUDA, torch.bfloat16, 128) is Attention.FLASH
    assert chosen(Attention.AUTO, CUDA, torch.float32, 128) is Attention.SDPA
    assert chosen(Attention.AUTO, CPU, torch.bfloat16, 128) is Attention.SDPA
    assert chosen(Attention.VARLEN, CUDA, torch.bfloat16, 128) is Attention.VARLEN


def test_auto_takes_the_kernel_of_torch_where_flash_attention_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert chosen(Attention.AUTO, CUDA, torch.float16, 64) is Attention.VARLEN
    with pytest.raises(ValueError, match="flash cannot run here: the package flash-attn is not installed"):
        chosen(Attention.FLASH, CUDA, torch.float16, 64)


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("kind", [Attention.VARLEN, Attention.FLASH])
def test_what_cannot_run_here_is_refused_with_the_reason(kind: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f"learner.attention {kind.value} cannot run here: it needs a CUDA device"):
        use_attention(random_policy(0), kind, torch.bfloat16)
    with pytest.raises(ValueError, match=r"it needs 16-bit activations, and these are torch.float32"):
        chosen(kind, CUDA, torch.float32, 128)
    with pytest.raises(ValueError, match="it needs a head size up to 256 in steps of 8, and the policy's is 20"):
        chosen(kind, CUDA, torch.bfloat16, 20)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=r"it needs compute capability 8\.0, and cuda has 7\.5"):
        chosen(kind, CUDA, torch.bfloat16, 128)


def test_a_model_on_a_cpu_gets_padded_blocks_and_a_shared_row_one_call_for_each_sequence() -> None:
    policy = random_policy(0)
    use_attention(policy, Attention.AUTO, torch.float32)
    assert policy.config._attn_implementation == PACKED_ATTENTION
    use_attention(policy, Attention.AUTO, torch.float32, shares_rows=True)
    assert policy.config._attn_implementation == SDPA_VARLEN


def test_a_kernel_of_an_older_torch_is_not_told_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 has no argument `enable_gqa`; it takes fewer key heads all the same."""
    kernel = varlen_attn_on_cpu

    def older(query: Tensor, key: Tensor, *arguments: Any, scale: float | None, window_size: tuple[int, int]) -> Tensor:
        grouped = query.shape[1] != key.shape[1]
        output: Tensor = kernel(query, key, *arguments, scale=scale, window_size=window_size, enable_gqa=grouped)
        return output

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", older)
    spec = importlib.util.find_spec(kernels.__name__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    query, keys = torch.randn(5, 4, 8), torch.randn(5, 2, 8)
    segments = Segments(*(torch.tensor([0, 2, 5], dtype=torch.int32),) * 2, 3, 3)
    expected = kernel(
        query, keys, keys, segments.cu_queries, segments.cu_keys, 3, 3, scale=None, enable_gqa=True, window_size=(-1, 0)
    )
    assert torch.equal(module._one_call(query, keys, keys, segments, None, None), expected)
