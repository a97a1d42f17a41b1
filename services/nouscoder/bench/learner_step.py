"""`nouscoder bench learner --shape`: a step of the learner on a device: MFU, memory, and the largest context that fits.

The policy has the shape of a real one and random weights. A batch fills `rows` rows of `row_tokens` tokens with
`sequences` rollouts each. Three things are measured, and each line is printed when it is known:

    bare      forward and backward pass of the same policy, rows, type, attention and checkpoints, with the
              cross-entropy of each token in chunks; no masters, objective, diagnostics, norm and optimizer
    step      a batch of one step by the learner's trainer
    context   how long one rollout of a step can be

MFU is the operations of the rollouts (learner/parallel/operations.py: attention counted, what is computed again not) by
the seconds and the device's peak: learner.peak_flops, else that of the vendor's data sheet, else that of a matrix
product. A rate is that of the median round. Peak memory is what tensors took at most in the step, without the
allocator's reserve.

The peak of a step's memory is the largest of several sums: weights, gradients and moments at the optimizer's step, or
weights and what grows with the tokens of a row in the backward pass. So it grows with the length ever faster, up to a
straight line, and the line through two steps is at most the truth: memory is full where it says, or before. Lengths are
doubled until that is nearer than twice the last one, because a step takes the longer the square of its length.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from nouscoder.bench.measuring import BenchError
from nouscoder.bench.shaped_policy import SHAPES, shaped_batch, shaped_policy
from nouscoder.config import Config, LearnerSection
from nouscoder.domain.batch import Batch
from nouscoder.errors import WrongUse
from nouscoder.learner.loading import prepare_thread
from nouscoder.learner.model.attention import use_attention
from nouscoder.learner.model.computation import compute_dtype
from nouscoder.learner.model.decoder_layers import checkpoint_activations, compile_layers
from nouscoder.learner.model.packing import MicroBatch, input_lengths, pack
from nouscoder.learner.parallel.operations import data_sheet_peak_flops, measured_peak_flops, training_flops
from nouscoder.learner.trainer import Trainer

_HEAD_CHUNK = 2048
_MULTIPLE = 1024
# The allocator and other users of the device leave about this much of its memory.
_USABLE = 0.97
_NEAR = 1 / 16
_MOST_TRIES = 8


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What is measured. `limit_s` bounds the search of the largest context, which is left out without `context`."""

    shape: str = "tiny"
    row_tokens: int = 32768
    rows: int = 2
    sequences: int = 8
    rounds: int = 3
    context: bool = False
    limit_s: float = 240.0


@dataclass(frozen=True, slots=True)
class StepRate:
    """Seconds of the median round; tokens are the inputs of the model. Peak bytes are 0 where there is no GPU."""

    seconds: float
    tokens_per_second: float
    mfu: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Try:
    """A step with a rollout of `length` tokens. The peak is 0 where memory is not measured, or did not suffice."""

    length: int
    fits: bool
    peak_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LargestContext:
    """`fits` tokens fit, 0: none was seen to. `fails` is the shortest length that did not fit, 0: none was tried."""

    fits: int
    fails: int
    tries: tuple[Try, ...]


@dataclass(frozen=True, slots=True)
class StepBench:
    """The figures. `share` is that of the step of the bare pass's tokens/s, `flops` those of the batch."""

    device: str
    peak_flops: float
    num_parameters: int
    lengths: tuple[int, ...]
    flops: float
    settings: dict[str, str]
    bare: StepRate
    step: StepRate
    share: float
    context: LargestContext | None


def defaults(load: StepLoad) -> list[str]:
    """Overrides of the configuration that the bench begins with: one step a batch, in bfloat16."""
    return ["learner.dtype=bfloat16", "learner.steps_per_batch=1", f"learner.microbatch_tokens={load.row_tokens}"]


def bench_step(load: StepLoad, config: Config, tell: Callable[[str], None]) -> StepBench:
    """Measure. `tell` gets a line for people whenever something is known. Raises BenchError for what cannot be."""
    settings, device = config.learner, torch.device(config.learner.device)
    _check(load, device)
    prepare_thread(settings.threads)
    vocabulary = SHAPES[load.shape][-1]
    batch = shaped_batch(vocabulary, [load.row_tokens // load.sequences] * load.sequences * load.rows)
    lengths = input_lengths([graded.rollout for graded in batch.rollouts])
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    peak = settings.peak_flops or data_sheet_peak_flops(settings.device)
    peak = peak or measured_peak_flops(settings.device, compute_dtype(settings))
    tell(f"device      {name}, peak {peak / 1e12:.1f} TFLOP/s")
    policy = shaped_policy(SHAPES[load.shape], device, compute_dtype(settings))
    flops, num_parameters = training_flops(policy, lengths), policy.num_parameters()
    tell(f"policy      {load.shape}, {num_parameters / 1e6:.1f} million weights; {_told(settings)}")
    tell(f"batch       {len(lengths)} rollouts of {lengths[0]} tokens, {flops / 1e12:.1f} TFLOP")

    def rate(name: str, work: Callable[[], object]) -> StepRate:
        seconds = _seconds(work, load.rounds, device, lambda line: tell(f"{name:10}  {line}"))
        found = StepRate(seconds, sum(lengths) / seconds, flops / seconds / peak, _peak_bytes(device))
        tell(f"{name:10}  {_line(found)}")
        return found

    bare = rate("bare", partial(bare_pass, _prepared(policy, settings), batch, settings))
    del policy
    _free(device)
    trainer = Trainer(shaped_policy(SHAPES[load.shape], device, torch.float32), config)
    step = rate("step", partial(trainer.train_batch, batch))
    share = step.tokens_per_second / bare.tokens_per_second
    tell(f"share       {share:.1%} of the bare pass")
    context = None
    if load.context:
        attempt = partial(_attempt, trainer, vocabulary, device)
        context = largest_context(attempt, _capacity(device), load.row_tokens, load.limit_s, tell)
    return StepBench(name, peak, num_parameters, tuple(lengths), flops, _shown(settings), bare, step, share, context)


def _check(load: StepLoad, device: torch.device) -> None:
    if load.shape not in SHAPES:
        raise WrongUse(f"there is no shape {load.shape}: choose one of {', '.join(SHAPES)}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BenchError(f"learner.device is {device}, and this machine has no CUDA device")
    if load.sequences > load.row_tokens:
        raise BenchError(f"a row of {load.row_tokens} tokens cannot have {load.sequences} rollouts")


def _prepared(policy: PreTrainedModel, settings: LearnerSection) -> PreTrainedModel:
    """As the learner prepares the model that computes (computation.py)."""
    use_attention(policy, settings.attention, compute_dtype(settings))
    if settings.compile:
        compile_layers(policy)
    checkpoint_activations(policy, settings.activation_checkpointing, settings.checkpointed_layers)
    return policy


def bare_pass(policy: PreTrainedModel, batch: Batch, settings: LearnerSection) -> None:
    """The gradient of the summed cross-entropy of the loss tokens. No chunk of logits is kept for the backward pass."""
    policy.zero_grad(set_to_none=True)
    head: Any = policy.get_output_embeddings()  # type: ignore[no-untyped-call]
    for row in pack([graded.rollout for graded in batch.rollouts], settings.microbatch_tokens, policy.device):
        torch.autograd.backward(_loss(policy, head.weight, row))


def _loss(policy: PreTrainedModel, weight: Tensor, row: MicroBatch) -> Tensor:
    output = policy.base_model(
        input_ids=row.input_ids, position_ids=row.position_ids, layout=row.layout, use_cache=False
    )
    states = torch.split(output.last_hidden_state[0].index_select(0, row.positions), _HEAD_CHUNK)
    chunks = zip(states, torch.split(row.targets, _HEAD_CHUNK), strict=True)
    losses = [checkpoint(_cross_entropy, part, weight, targets, use_reentrant=False) for part, targets in chunks]
    return torch.stack(losses).sum() / len(row.targets)


def _cross_entropy(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(states, weight).float(), targets, reduction="sum")


def _seconds(work: Callable[[], object], rounds: int, device: torch.device, tell: Callable[[str], None]) -> float:
    """The median of the rounds after one that warms up, and the peak of memory in them."""
    found = []
    for number in range(rounds + 1):
        if number == 1 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - started)
        tell(f"round {number}{' (warms up)' if not number else ''}: {found[-1]:.3f} s")
    return statistics.median(found[1:])


def _attempt(trainer: Trainer, vocabulary: int, device: torch.device, length: int) -> int | None:
    """The peak of memory of a step with a rollout of this length, and a short one; None when it does not fit."""
    _free(device)
    try:
        trainer.train_batch(shaped_batch(vocabulary, [length, 256]))
    except torch.OutOfMemoryError:
        trainer.model.zero_grad(set_to_none=True)
        trainer.computing.zero_grad(set_to_none=True)
        return None
    return _peak_bytes(device)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _capacity(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def _shown(settings: LearnerSection) -> dict[str, str]:
    checkpoints = ("activation_checkpointing", "checkpointed_layers")
    names = ("dtype", "attention", *checkpoints, "optimizer_states", "compile", "microbatch_tokens")
    return {name: str(getattr(settings, name)) for name in names}


def _told(settings: LearnerSection) -> str:
    return ", ".join(f"{name} {value}" for name, value in _shown(settings).items())


def _line(rate: StepRate) -> str:
    memory = f", peak {rate.peak_bytes / 2**30:.1f} GiB" if rate.peak_bytes else ""
    return f"{rate.tokens_per_second:.0f} tokens/s, MFU {rate.mfu:.1%}, {rate.seconds:.3f} s{memory}"


def largest_context(
    attempt: Callable[[int], int | None], capacity: int, first: int, limit_s: float, tell: Callable[[str], None]
) -> LargestContext:
    """Try lengths from `first` on until one does not fit, or `limit_s` would be exceeded.

    `attempt` trains on a rollout of a length, and returns the peak of memory, or None when it does not fit. `capacity`
    is the memory of the device. Each try is told.
    """
    tries: list[Try] = []
    ends = time.monotonic() + limit_s
    length = first
    while len(tries) < _MOST_TRIES:
        begun = time.monotonic()
        peak = attempt(length)
        tries.append(Try(length, peak is not None, peak or 0, time.monotonic() - begun))
        memory = "does not fit" if peak is None else f"peak {peak / 2**30:.1f} GiB"
        tell(f"context     {length} tokens: {memory}, {tries[-1].seconds:.1f} s")
        following = _next_length(tries, capacity)
        if following is None or time.monotonic() + _longest_s(tries, following) > ends:
            break
        length = following
    fitting = [one.length for one in tries if one.fits]
    failing = [one.length for one in tries if not one.fits]
    return LargestContext(max(fitting, default=0), min(failing, default=0), tuple(tries))


def _next_length(tries: list[Try], capacity: int) -> int | None:
    """The next length to try; None when the largest is known to a sixteenth."""
    fitting = sorted((one.length, one.peak_bytes) for one in tries if one.fits)
    failing = min((one.length for one in tries if not one.fits), default=0)
    if not fitting:
        return _rounded(failing / 2) or None
    longest = fitting[-1][0]
    if failing:
        return None if failing - longest <= failing * _NEAR else _rounded((longest + failing) / 2)
    if len(fitting) < 2 or fitting[-1][1] == fitting[-2][1]:
        return 2 * longest
    (short, of_short), (long, of_long) = fitting[-2:]
    estimate = _rounded(long + (capacity * _USABLE - of_long) * (long - short) / (of_long - of_short))
    # After a length near the estimate has fit, a sixteenth more is tried.
    return min(2 * longest, max(estimate, _rounded(longest * (1 + _NEAR))))


def _longest_s(tries: list[Try], length: int) -> float:
    """A step of this length takes at most the square of the lengths' ratio as long as the last one."""
    last = tries[-1]
    return last.seconds * max(1.0, length / last.length) ** 2


def _rounded(length: float) -> int:
    return int(length) // _MULTIPLE * _MULTIPLE
