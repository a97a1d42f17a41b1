"""Partial rollouts: a long rollout goes on where another worker ended, from the tokens that the broker keeps of it.

ResumableSampler records the tokens of one rollout, and continues those of a worker that ended. PartialReports sends
new tokens to the broker while they are sampled.

INVARIANT: the recorded tokens are those that the environment gave and the policy sampled, each once and in order. A
kept token is used only after exactly the tokens that it followed before. It is then not sampled again, and its
log-probability and version stay as they were. From the first difference on the kept tokens are dropped. What the broker
keeps of a rollout begins what this worker has sampled of it, or the next report replaces it. A report that fails costs
nothing: its tokens are in the next one.

The environment runs from its start also when it continues a rollout. A turn that has ended is answered from the kept
tokens, and tools are called again. The turn that was interrupted goes on in the engine. A tool that answers otherwise
than before gives other tokens, so from there on the policy samples afresh.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from nouscoder.domain.partial import Part, PartialRollout, tokens_from
from nouscoder.domain.tokens import Completion, FinishReason, SampledTokens, int32
from nouscoder.generation.engines.base import Engine, EngineError, SampleRequest
from nouscoder.generation.environments.base import Sampler
from nouscoder.generation.metrics import GenerationMetrics, PartialTokens
from nouscoder.rpc.channel import PeerError

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5
# The time to the next report when the broker does not take one, for example because its memory is full.
_AGAIN_S = 5.0

Leases = Callable[[], Mapping[str, str]]
KeepPartials = Callable[[Mapping[str, PartialRollout]], Awaitable[dict[str, int | None]]]


class ResumableSampler:
    """Passes the requests of one rollout to `sampler`. `kept` are the tokens that the broker keeps of it.

    `num_continued` and `num_dropped` count the sampled tokens among them that were used and that were not.
    """

    def __init__(self, sampler: Sampler, kept: PartialRollout | None = None) -> None:
        self._sampler = sampler
        self._kept: deque[Part] = deque(kept.parts() if kept else ())
        self._parts: list[Part] = []
        self._tokens: list[int] = []
        self._running: SampleRequest | None = None
        self._is_cut = False  # the newest turn ended at a limit
        self._is_linear = True  # each request goes on from the tokens of those before
        self._num_read = 0  # recorded tokens before the last sampled one: those whose experts are known
        self._num_saved = kept.end_token if kept else 0
        self.num_saved_sampled = kept.num_sampled_tokens if kept else 0
        self.num_continued = 0
        self.num_dropped = 0

    @property
    def request_id(self) -> str | None:
        """The request of this rollout that the engine has."""
        return self._running.request_id if self._running else None

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version among the recorded and the kept tokens; None without a sampled one."""
        sampled = [part for part in (*self._parts, *self._kept) if isinstance(part, SampledTokens)]
        return min((span.policy_version for part in sampled for span in part.versions), default=None)

    @property
    def num_sampled(self) -> int:
        """Recorded tokens that were sampled. Those that the engine samples are recorded when their turn ends."""
        return sum(len(part.token_ids) for part in self._parts if isinstance(part, SampledTokens))

    @property
    def first_unsaved(self) -> int:
        """The first token that the broker does not keep, as the engine counts those of the present turn."""
        return max(0, self._num_saved - len(self._tokens))

    def sample(self, request: SampleRequest) -> asyncio.Future[Completion]:
        """A future of the completion. Cancelling it cancels the request."""
        return asyncio.ensure_future(self._turn(request))

    def unsaved(self, running: SampledTokens | None) -> PartialRollout | None:
        """The tokens that the broker does not keep. `running` are those that the engine has, from `first_unsaved` on.

        None when no sampled token is among them, or the requests of the environment do not follow one another.
        """
        if not self._is_linear:
            return None
        if running is not None and self.first_unsaved:
            return PartialRollout.rest_of_turn(self._num_saved, running)
        # Whether a turn was cut by the engine's capacity cannot be seen from its tokens, so its end is not kept.
        parts = self._parts[:-1] if self._is_cut else self._parts
        if running is not None:
            parts = self._with_running(running)
        try:
            return tokens_from(parts, self._num_saved)
        except ValueError:
            return None

    def saved(self, piece: PartialRollout) -> None:
        """The broker keeps this piece after those before it."""
        self._num_saved = piece.end_token
        self.num_saved_sampled += piece.num_sampled_tokens

    def forgotten(self) -> None:
        """The broker keeps other tokens than expected: it gets all of them again."""
        self._num_saved = self.num_saved_sampled = 0

    async def _turn(self, request: SampleRequest) -> Completion:
        kept = self._kept_turn(request, self._record_given(request))
        if kept is None:
            completion = await self._from_engine(request)
            self._record(completion)
        else:
            self._record(kept)
            self.num_continued += len(kept.token_ids)
            reason = self._end_of(kept, request)
            completion = kept.ended(reason) if reason else await self._continued(kept, request)
        self._is_cut = completion.finish_reason is FinishReason.LENGTH
        return completion

    def _record_given(self, request: SampleRequest) -> memoryview[int] | None:
        """Record the tokens that were given since the last turn; returns them, None when there are none."""
        prompt, num_tokens = list(request.prompt_token_ids), len(self._tokens)
        if self._running is not None or prompt[:num_tokens] != self._tokens:
            self._is_linear = False
            self._drop_kept()
        if len(prompt) == num_tokens or not self._is_linear:
            return None
        given = int32(prompt[num_tokens:])
        self._parts.append(given)
        self._tokens = prompt
        self._is_cut = False
        return given

    def _kept_turn(self, request: SampleRequest, given: memoryview[int] | None) -> SampledTokens | None:
        """The kept tokens of this turn. Without any, or after other tokens than before, None."""
        if given is not None and self._kept:
            before = self._kept[0]
            if isinstance(before, SampledTokens) or before != given:
                self._drop_kept()
            else:
                self._kept.popleft()
        if not self._kept:
            return None
        turn = self._kept[0]
        if not isinstance(turn, SampledTokens) or len(turn.token_ids) > request.sampling.max_new_tokens:
            self._drop_kept()
            return None
        self._kept.popleft()
        return turn

    def _end_of(self, kept: SampledTokens, request: SampleRequest) -> FinishReason | None:
        """Why a kept turn ended; None when it was interrupted."""
        if request.is_ended(kept.token_ids):
            return FinishReason.STOP
        is_full = len(kept.token_ids) == request.sampling.max_new_tokens
        return FinishReason.LENGTH if self._kept or is_full else None

    async def _continued(self, kept: SampledTokens, request: SampleRequest) -> Completion:
        num_kept = len(kept.token_ids)
        sampling = replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - num_kept)
        rest = await self._from_engine(
            replace(request, prompt_token_ids=tuple(self._tokens), sampling=sampling, num_kept=num_kept)
        )
        whole = SampledTokens.concatenated([kept, self._first_read(rest)])
        self._parts[-1] = whole
        self._add_tokens(rest)
        return whole.ended(rest.finish_reason)

    async def _from_engine(self, request: SampleRequest) -> Completion:
        self._running = request
        try:
            return await self._sampler.sample(request)
        finally:
            self._running = None

    def _record(self, sampled: SampledTokens) -> None:
        self._parts.append(self._first_read(sampled))
        self._add_tokens(sampled)

    def _add_tokens(self, sampled: SampledTokens) -> None:
        self._tokens += sampled.token_ids
        self._num_read = len(self._tokens) - 1

    def _first_read(self, sampled: SampledTokens) -> SampledTokens:
        """`sampled`, the next tokens, with experts only of the tokens that no recorded part has."""
        if sampled.experts is None or not self._is_linear:
            return sampled
        num_new = len(self._tokens) + len(sampled.token_ids) - 1 - self._num_read
        return replace(sampled, experts=sampled.experts.last(num_new))

    def _with_running(self, running: SampledTokens) -> list[Part]:
        """The recorded parts and the tokens of the present turn, which may go on from kept ones."""
        running, last = self._first_read(running), self._parts[-1]
        if self._running is not None and self._running.num_kept and isinstance(last, SampledTokens):
            return [*self._parts[:-1], SampledTokens.concatenated([last, running])]
        return [*self._parts, running]

    def _drop_kept(self) -> None:
        self.num_dropped += sum(len(part.token_ids) for part in self._kept if isinstance(part, SampledTokens))
        self._kept.clear()
        self.forgotten()


@dataclass(frozen=True, slots=True)
class PartialReports:
    """Reports a rollout when it has sampled `every_tokens` tokens more; 0 never.

    `samplers`: those of the rollouts in progress, by their ids. `keep`: see BrokerClient.keep_partials.
    """

    engine: Engine
    samplers: Mapping[str, ResumableSampler]
    keep: KeepPartials
    every_tokens: int
    metrics: GenerationMetrics
    _lost: set[str] = field(default_factory=set)

    async def run(self, leases: Leases) -> None:
        """Send reports until cancelled. `leases` answers the lease id of each rollout in progress."""
        while self.every_tokens:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                await self._send(leases(), is_last=False)
            except (PeerError, EngineError) as error:
                log.warning("partial rollouts were not saved", extra={"reason": str(error)})
                await asyncio.sleep(_AGAIN_S)
        await asyncio.Event().wait()

    async def send_last(self, leases: Mapping[str, str]) -> None:
        """Report rollouts of more than `every_tokens` before their leases end. Raises PeerError and EngineError."""
        if self.every_tokens:
            await self._send(leases, is_last=True)

    async def _send(self, leases: Mapping[str, str], *, is_last: bool) -> None:
        self._lost.intersection_update(leases.values())
        asked = {name: lease_id for name, lease_id in leases.items() if lease_id not in self._lost}
        unsaved = await self._unsaved(asked, is_last=is_last)
        if not unsaved:
            return
        answers = await self.keep({asked[name]: piece for name, piece in unsaved.items()})
        for rollout_id, piece in unsaved.items():
            num_kept = answers[asked[rollout_id]]
            if num_kept is None:
                self._lost.add(asked[rollout_id])
            is_kept = num_kept == piece.end_token
            if is_kept:
                self.metrics.partial_tokens.labels(PartialTokens.SAVED.value).inc(piece.num_sampled_tokens)
            sampler = self.samplers.get(rollout_id)
            if sampler is not None and is_kept:
                sampler.saved(piece)
            elif sampler is not None:
                sampler.forgotten()

    async def _unsaved(self, rollout_ids: Iterable[str], *, is_last: bool) -> dict[str, PartialRollout]:
        """What to keep of rollouts with `every_tokens` new tokens; `is_last`: in all. Raises EngineError."""
        chosen, progress = {}, self.engine.progress
        for rollout_id in rollout_ids:
            sampler = self.samplers.get(rollout_id)
            if sampler is not None:
                num_sampled = sampler.num_sampled + progress.get(sampler.request_id or "", 0)
                num_unsaved = num_sampled - sampler.num_saved_sampled
                if num_unsaved > 0 and (num_sampled if is_last else num_unsaved) >= self.every_tokens:
                    chosen[rollout_id] = sampler
        if not chosen:
            return {}
        starts = {s.request_id: s.first_unsaved for s in chosen.values() if s.request_id is not None}
        running = await self.engine.sampled(starts)
        pieces = {name: sampler.unsaved(running.get(sampler.request_id or "")) for name, sampler in chosen.items()}
        return {name: piece for name, piece in pieces.items() if piece is not None}
