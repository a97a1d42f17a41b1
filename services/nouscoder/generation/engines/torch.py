"""The `torch` engine: continuous batching of a transformers causal language model, on a CPU or a GPU.

INVARIANT: every added request is in exactly one state: waiting, running, returned once by `step`, or cancelled. Each
sampled token has the version of the weights that gave its logits. After `ModelWeights.load` the parameters are the
tensors of the policy's files, each rounded to its parameter's type. After an error they are what they were before.

A step is one pass over the newest tokens of all running requests, and one pass over new prompts when some are admitted.
New weights are copied in place between two steps. The keys and values in the cache are kept, as in PipelineRL
(in-flight updates, 2509.19128 section 4), so that requests continue.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from nouscoder.generation.engines.architecture import Parameters
from nouscoder.generation.engines.base import EngineError, EnginePlaces, EngineUnusable, SampleRequest
from nouscoder.generation.engines.decoder import Decoder
from nouscoder.generation.engines.kv_cache import DecodePass, KeyValueCache, PromptPass
from nouscoder.generation.engines.slots import ExpertRecorder, Slots
from nouscoder.generation.engines.stepped import Ended, Row, StepEngine
from nouscoder.policy_folder.policy_tensors import PolicyTensors, merge_experts, unread_names
from nouscoder.policy_folder.weights_files import FileState, WeightsUnusable

_MAX_PROMPT_PASS_TOKENS = 16384
# A pass over prompts costs about as much as a decoding step, so new requests are admitted several at a time.
_JOIN_SHARE = 8
_PAD_ID = 0  # any id is right, because nothing attends to padding


class ModelWeights:
    """The weights of `model`, which are changed in place.

    Of an adapter whose base is in the model, only what it or the one before it changes is read and computed again.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = Parameters(model.state_dict(keep_vars=True))
        self._base: tuple[tuple[Path, FileState], ...] = ()  # of the adapter in use; () for whole weights
        self._changed: frozenset[str] = frozenset()

    def load(self, files: Sequence[Path], source: str) -> None:
        """Load the policy in these files; `source` names it. Raises EngineError when it does not fit the model."""
        try:
            policy = PolicyTensors(files)
            is_base_here = bool(policy.base) and policy.base == self._base
            names = policy.changed | self._changed if is_base_here else None
            policy.check_tied(self._parameters.tied, source)
            weights = dict(policy.read(names, self._parameters.device))
        except WeightsUnusable as error:
            raise EngineError(str(error)) from error
        try:
            weights = merge_experts(weights)
        except ValueError as error:
            raise EngineError(f"{files[0].parent}: {error}") from error
        own, prefix = self._parameters.tensors, f"{self._model.base_model_prefix}."  # files may leave it out
        weights = {
            name if name in own or prefix + name not in own else prefix + name: weights[name] for name in weights
        }
        for name in unread_names(self._model, weights, own):
            del weights[name]
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        self._parameters.check_shapes(shapes, source, is_whole=not is_base_here)
        for name, tensor in weights.items():
            if not bool(torch.isfinite(tensor).all()):
                raise EngineError(f"{source}: {name} holds values that are not finite")
        with torch.no_grad():
            for name, tensor in weights.items():
                self._parameters.tensors[name].copy_(tensor)
        self._base, self._changed = policy.base, policy.changed


class TorchEngine(StepEngine[Row]):
    """See the module. Not thread-safe: one thread uses it. After an EngineError from `step` it cannot be used again."""

    name = "torch"

    def __init__(
        self,
        policy_folder: Path,
        *,
        max_running: int,
        max_tokens_total: int,
        guest_places: int = 0,
        device: str = "cpu",
        threads: int = 1,
        dtype: str = "float32",
        records_experts: bool = False,
    ) -> None:
        """Build the architecture without weights. `records_experts`: completions have them. Raises EngineUnusable."""
        torch.set_num_threads(threads)
        try:
            self._device = torch.device(device)
            self._decoder = Decoder(policy_folder, self._device, getattr(torch, dtype))
            self._recorder = ExpertRecorder(self._decoder.model) if records_experts else None
        except (RuntimeError, ValueError) as error:
            raise EngineUnusable(str(error)) from error
        self._weights = ModelWeights(self._decoder.model)
        super().__init__(EnginePlaces(max_running, guest_places), min(max_tokens_total, self._decoder.positions))
        self._cache = KeyValueCache(self._places.total, self._capacity)
        self._slots = Slots(self._cache, self._places.total, self._capacity, self._device)
        self._steps_since_join = 0

    @property
    def running(self) -> list[Row]:
        return self._slots.rows

    def _row(self, request: SampleRequest, max_tokens: int) -> Row:
        return Row(request, max_tokens)

    def cancel(self, request_id: str) -> None:
        if self._waiting.pop(request_id, None) is None:
            rows = enumerate(self._slots.rows)
            self._slots.leave([slot for slot, row in rows if row.request.request_id == request_id])

    def load_policy(self, files: Sequence[Path], policy_version: int) -> None:
        """Load new weights. The cache is kept."""
        source = f"policy version {policy_version}, {files[-1]}"
        self._weights.load(files, source)
        if self.policy_version is None:
            self._decoder.check(source)
        self.policy_version = policy_version

    @torch.inference_mode()
    def step(self) -> Ended:
        """Decode one token for every request."""
        if self.policy_version is None:
            raise EngineError("no policy has been loaded")
        finished: Ended = []
        if self._slots.rows:
            finished += self._decode()
        self._steps_since_join += 1
        joining = self._next_to_join()
        if joining:
            finished += self._join(joining)
        return finished

    def _next_to_join(self) -> list[Row]:
        if not self._waiting:
            return []
        admitted = self._places.admitted(self._waiting.values(), self._slots.rows)
        worth_it = max(1, self._places.rollouts // _JOIN_SHARE)
        if not admitted or (self._slots.rows and len(admitted) < worth_it and self._steps_since_join < worth_it):
            return []
        rows: list[Row] = []
        prompts: set[tuple[int, ...]] = set()
        width = 0
        for row in admitted:
            prompts.add(row.prompt)
            width = max(width, len(row.prompt))
            if rows and width * len(prompts) > _MAX_PROMPT_PASS_TOKENS:
                break
            rows.append(row)
        return rows

    def _join(self, rows: list[Row]) -> Ended:
        """Compute each distinct prompt once, copy it to the slots of its requests, and sample their first tokens."""
        prompts = list(dict.fromkeys(row.prompt for row in rows))
        position = {prompt: index for index, prompt in enumerate(prompts)}
        sources = torch.tensor([position[row.prompt] for row in rows], device=self._device)
        passing = PromptPass(self._cache, len(self._slots), sources)
        logits = self._prompt_logits(prompts, passing)[sources]
        for row in rows:
            del self._waiting[row.request.request_id]
        if self._recorder is not None:
            chosen = self._recorder.take(len(prompts), max(map(len, prompts)))
            for row in rows:
                row.experts.append(chosen[position[row.prompt], : len(row.prompt)])
        self._steps_since_join = 0
        return self._sample(self._slots.join(rows), logits)

    def _prompt_logits(self, prompts: Sequence[Sequence[int]], passing: PromptPass) -> Tensor:
        """Logits after each prompt, [prompts, vocabulary]. Padding is on the right, where attention ignores it."""
        width = max(len(prompt) for prompt in prompts)
        padded = torch.tensor(
            [[*prompt, *[_PAD_ID] * (width - len(prompt))] for prompt in prompts], device=self._device
        )
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self._device)
        return self._decoder.logits(padded, torch.arange(width, device=self._device)[None], passing, last)

    def _decode(self) -> Ended:
        longest = 1 + max(row.cached_tokens for row in self._slots.rows)
        lengths = self._slots.lengths
        passing = DecodePass(self._cache, lengths, longest)
        logits = self._decoder.logits(self._slots.last_tokens[:, None], lengths[:, None], passing)
        self._slots.advance()
        if self._recorder is not None:
            for row, chosen in zip(self._slots.rows, self._recorder.take(len(self._slots), 1), strict=True):
                row.experts.append(chosen)
        return self._sample(range(len(self._slots)), logits)

    def _sample(self, slots: range, logits: Tensor) -> Ended:
        """Choose and record a token for each of these slots, and remove the requests that have ended."""
        choice = self._slots.choose(slots, logits)
        logprobs: list[float] = choice.logprobs.tolist()
        rows = self._slots.rows[slots.start : slots.stop]
        for row, logprob in zip(rows, logprobs, strict=True):
            if logprob != logprob:
                name = f"request {row.request.request_id}"
                raise EngineError(f"policy version {self.policy_version} gave {name} logits that are NaN")
        self._slots.took(slots, choice.token_ids)
        self.num_tokens += len(rows)
        version = self.policy_version
        assert version is not None
        ended: list[int] = []
        finished: Ended = []
        for slot, row, token_id, logprob in zip(slots, rows, choice.token_ids.tolist(), logprobs, strict=True):
            row.take(token_id, logprob, version)
            if (reason := row.finish_reason) is not None:
                ended.append(slot)
                finished.append((row.request.request_id, row.sampled().ended(reason)))
        self._slots.leave(ended)
        return finished
