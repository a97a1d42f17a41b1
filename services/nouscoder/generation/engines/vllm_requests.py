"""The requests of the vllm engine: waiting here, or given to vLLM.

INVARIANT: every accepted request is in exactly one of `_waiting` and `_running` until its future ends, and its future
ends exactly once: with its completion, with an error, or cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nouscoder.domain.tokens import Completion, FinishReason, SampledTokens, VersionSpan, float32, int32
from nouscoder.generation.engines.base import (
    EngineError,
    EnginePlaces,
    EngineStopped,
    SampleRequest,
    checked_max_tokens,
    seed_from,
    seed_of,
)

_MAX_SEED = 2**63
_TAKE_LIMIT_S = 120.0
_TICK_S = 0.001


def sampling_params(request: SampleRequest, max_tokens: int) -> Any:
    """vLLM's parameters of a request that is cut at `max_tokens`. Each request has its own random stream."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=_stream_of(request),
        max_tokens=max_tokens,
        stop_token_ids=sorted(request.stop_token_ids),
        ignore_eos=True,  # the request names every stop token
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _stream_of(request: SampleRequest) -> int:
    """The seed of vLLM's random stream, which always starts from its beginning.

    So a request with kept tokens has another stream: the same one would give it the numbers of the kept tokens again.
    """
    seed = seed_of(request)
    if request.num_kept:
        seed = seed_from(seed, request.num_kept)
    return seed % _MAX_SEED


def prompt_of(request: SampleRequest, policy_version: int) -> Any:
    """vLLM's form of the prompt. Cached prefixes are shared only with requests of the same version."""
    from vllm.inputs.engine import tokens_input

    return tokens_input(list(request.prompt_token_ids), cache_salt=f"policy-{policy_version}")


def completion_of(request_id: str, output: Any) -> Completion:
    """The completion in vLLM's output, whose engine process tells the version of each token. Raises EngineError."""
    answer = output.outputs[0]
    name = f"request {request_id}"
    if answer.finish_reason not in ("stop", "length"):
        raise EngineError(f"{name} ended in vLLM with {answer.finish_reason}")
    sampled = _sampled(name, answer.token_ids, answer.logprobs, answer.weight_versions)
    return sampled.ended(FinishReason(answer.finish_reason))


def sampled_of(request_id: str, state: Any, start: int) -> SampledTokens | None:
    """The tokens from number `start` on that vLLM has sampled, None when there is none. Raises EngineError."""
    token_ids = state.detokenizer.output_token_ids
    if len(token_ids) <= start:
        return None
    flat, spans = state.logprobs_processor.logprobs, state._weight_version_spans()
    return _sampled(f"request {request_id}", token_ids, flat, spans).after(start)


def _sampled(name: str, token_ids: Sequence[int], flat: Any, spans: Any) -> SampledTokens:
    """vLLM's tokens, flat log-probabilities and spans of versions. Raises EngineError."""
    if [flat.token_ids[start] for start in flat.start_indices] != list(token_ids):
        raise EngineError(f"{name}: vLLM's log-probabilities are not those of its tokens")
    try:
        return SampledTokens(
            token_ids=int32(token_ids),
            logprobs=float32(flat.logprobs[start] for start in flat.start_indices),
            versions=tuple(VersionSpan(int(span.version), span.end - span.start) for span in spans),
        )
    except ValueError as error:  # a NaN among the log-probabilities
        raise EngineError(f"{name}: vLLM gave no valid completion: {error}") from error


@dataclass(slots=True, eq=False)
class _Row:
    """A request. While it runs, `task` waits for vLLM; `collector` is None until vLLM has taken the request."""

    request: SampleRequest
    max_tokens: int
    future: asyncio.Future[Completion]
    task: asyncio.Task[None] | None = None
    collector: Any = None


class VllmRequests:
    """`on_room` is called when a request has left, `on_failure` when vLLM fails."""

    def __init__(
        self, llm: Any, capacity: int, on_room: Callable[[], None], on_failure: Callable[[EngineStopped], None]
    ) -> None:
        self._llm = llm
        self._capacity = capacity
        self._on_room = on_room
        self._on_failure = on_failure
        self._waiting: dict[str, _Row] = {}
        self._running: dict[str, _Row] = {}
        self._aborting: set[asyncio.Future[None]] = set()

    @property
    def num_running(self) -> int:
        """Requests given to vLLM."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests waiting for a place."""
        return len(self._waiting)

    @property
    def progress(self) -> dict[str, int]:
        """Tokens sampled so far of each request given to vLLM, by request id."""
        states = self._llm.output_processor.request_states
        found = {}
        for request_id, row in self._running.items():
            state = None if row.collector is None else states.get(row.collector.request_id)
            found[request_id] = 0 if state is None else state.detokenizer.num_output_tokens()
        return found

    def sampled(self, starts: Mapping[str, int]) -> dict[str, SampledTokens]:
        """As Engine.sampled."""
        states = self._llm.output_processor.request_states
        found = {}
        for request_id, start in starts.items():
            row = self._running.get(request_id)
            state = states.get(row.collector.request_id) if row is not None and row.collector is not None else None
            tokens = None if state is None else sampled_of(request_id, state, start)
            if tokens is not None:
                found[request_id] = tokens
        return found

    def add(self, request: SampleRequest, future: asyncio.Future[Completion]) -> None:
        """Queue a request, whose completion `future` gets. Raises EngineError naming it."""
        ids_in_use = self._waiting.keys() | self._running.keys()
        row = _Row(request, checked_max_tokens(request, ids_in_use, self._capacity), future)
        self._waiting[request.request_id] = row
        future.add_done_callback(lambda _: self._leave(row))

    def admit(self, places: EnginePlaces, policy_version: int) -> None:
        """Give waiting requests to vLLM that have a place."""
        for row in places.admitted(self._waiting.values(), self._running.values()) if self._waiting else ():
            request_id = row.request.request_id
            self._running[request_id] = self._waiting.pop(request_id)
            row.task = asyncio.create_task(self._run(row, policy_version))

    async def all_taken(self) -> None:
        """Wait until vLLM has taken every running request, so that it knows which of them have begun."""
        while any(row.collector is None for row in self._running.values()):
            await asyncio.sleep(_TICK_S)

    def restart_unstarted(self, policy_version: int) -> None:
        """Give requests without a token to vLLM again: the cache may have their prompts of older weights."""
        states = self._llm.output_processor.request_states
        for row in self._running.values():
            state = states.get(row.collector.request_id)
            if state is not None and state.is_prefilling:
                self._abort(row)
                row.collector = None
                row.task = asyncio.create_task(self._run(row, policy_version))

    def end_all(self, error: EngineError) -> None:
        """End every request with `error`."""
        for row in [*self._waiting.values(), *self._running.values()]:
            if row.task is not None:
                row.task.cancel()
            if not row.future.done():
                row.future.set_exception(error)
                row.future.exception()

    async def _run(self, row: _Row, policy_version: int) -> None:
        """Wait for vLLM's only output of the request."""
        request_id = row.request.request_id
        try:
            prompt, parameters = prompt_of(row.request, policy_version), sampling_params(row.request, row.max_tokens)
            async with asyncio.timeout(_TAKE_LIMIT_S):
                collector = row.collector = await self._llm.add_request(request_id, prompt, parameters)
            if row.future.done():  # cancelled meanwhile
                await self._llm.abort(collector.request_id, internal=True)
                return
            completion = completion_of(request_id, await collector.get())
        except Exception as error:  # whatever vLLM raises, the caller must get it
            stopped = EngineStopped(f"the engine failed: {str(error) or type(error).__name__}")
            stopped.__cause__ = error
            self._on_failure(stopped)
        else:
            if not row.future.done():
                row.future.set_result(completion)
                self._leave(row)

    def _leave(self, row: _Row) -> None:
        """Forget a row whose future has ended in any way; the second call does nothing."""
        request_id = row.request.request_id
        if self._waiting.get(request_id) is row:
            del self._waiting[request_id]
        elif self._running.get(request_id) is row:
            del self._running[request_id]
            if row.future.cancelled():
                self._abort(row)
        self._on_room()

    def _abort(self, row: _Row) -> None:
        """Abort the request in vLLM. One that vLLM is still taking is aborted by `_run`."""
        if row.task is not None and row.collector is not None and not row.task.done():
            row.task.cancel()
            aborting = asyncio.ensure_future(self._llm.abort(row.collector.request_id, internal=True))
            self._aborting.add(aborting)
            aborting.add_done_callback(self._aborting.discard)
