"""What the API may do in the worker: sample for guests, after the rollouts of the run.

INVARIANT: at most `slots` samples of guests are in the engine at a time, in places beside those of rollouts. While
there are rollouts, guests use at most GUEST_SHARE of what rollouts sample, with CREDIT_TOKENS in advance and one sample
more: a sampled token counts as one, and PROMPT_TOKENS tokens of a prompt as one. Until it ends, a sample counts with
all tokens that it may have. When a sample ends in any way, the engine has no request of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from nouscoder.domain.tokens import Completion, SampledTokens
from nouscoder.generation.engines.base import Engine, EngineStopped, SampleRequest
from nouscoder.generation.weights.policies import Policies

GUEST_SHARE = 0.02
PROMPT_TOKENS = 4  # reading them costs an engine about as much as sampling one token, or less
CREDIT_TOKENS = 64.0
_LOOK_S = 0.02


class GuestShare:
    """The share of guests, in tokens. It refills with the tokens of rollouts."""

    def __init__(self) -> None:
        self._credit = CREDIT_TOKENS
        self._rollout_tokens = 0

    @property
    def is_left(self) -> bool:
        """Whether a sample may begin."""
        return self._credit > 0

    def look(self, rollout_tokens: int, *, has_rollouts: bool) -> None:
        """Count what rollouts have sampled so far. Without rollouts guests take nothing from anybody."""
        self._credit += GUEST_SHARE * max(0, rollout_tokens - self._rollout_tokens)
        self._credit = min(CREDIT_TOKENS, self._credit) if has_rollouts else CREDIT_TOKENS
        self._rollout_tokens = rollout_tokens

    def begin(self, num_prompt_tokens: int, most_tokens: int) -> None:
        """Count a sample that begins."""
        self._credit -= num_prompt_tokens / PROMPT_TOKENS + most_tokens

    def end(self, num_left: int) -> None:
        """Give back the tokens that a sample did not have."""
        self._credit = min(CREDIT_TOKENS, self._credit + num_left)


class GuestDesk:
    """A GuestEngine on the engine of the run. Use `open_desk`."""

    def __init__(self, engine: Engine, policies: Policies, slots: int) -> None:
        self._engine = engine
        self._policies = policies
        self._slots = slots
        self._share = GuestShare()
        self._ended_tokens = 0
        self._waiting: deque[tuple[SampleRequest, asyncio.Future[Completion]]] = deque()
        self._sampling: dict[str, asyncio.Future[Completion]] = {}  # what the callers got, of samples in the engine
        self._seen: dict[str, int] = {}  # tokens of the samples in the engine, when last looked at
        self._changed = asyncio.Event()

    @property
    def policy_version(self) -> int | None:
        """The version of the run's policy in use."""
        return None if self._policies.current is None else self._policies.current.policy_version

    async def policy_after(self, policy_version: int) -> int:
        """The version in use, once there is a newer one than this."""
        await self._policies.wait_for(policy_version + 1)
        current = self.policy_version
        assert current is not None
        return current

    def sample(self, request: SampleRequest) -> asyncio.Future[Completion]:
        """A future of the completion, which waits for its turn first. Cancelling it cancels the request."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._changed.set()
        return future

    async def sampled(self, starts: Mapping[str, int]) -> dict[str, SampledTokens]:
        """As Engine.sampled."""
        known = {name: start for name, start in starts.items() if name in self._sampling}
        return await self._engine.sampled(known) if known else {}

    async def run(self) -> None:
        """Begin samples in turn. Never returns."""
        while True:
            is_idle = not self._waiting and not self._sampling
            with suppress(TimeoutError):
                async with asyncio.timeout(None if is_idle else _LOOK_S):
                    await self._changed.wait()
            self._changed.clear()
            self._look()
            while self._waiting and (self._waiting[0][1].done() or self._has_room()):
                self._begin(*self._waiting.popleft())

    def end_all(self, error: EngineStopped) -> None:
        """End every sample with `error`."""
        for future in [*self._sampling.values(), *(future for _, future in self._waiting)]:
            if not future.done():
                future.set_exception(error)
                future.exception()  # retrieved, because nobody may ask for it
        self._waiting.clear()

    def _has_room(self) -> bool:
        return len(self._sampling) < self._slots and self._share.is_left

    def _look(self) -> None:
        progress = self._engine.progress
        self._seen = {name: progress.get(name, self._seen.get(name, 0)) for name in self._sampling}
        guest_tokens = self._ended_tokens + sum(self._seen.values())
        self._share.look(self._engine.num_tokens - guest_tokens, has_rollouts=self._engine.num_rollouts > 0)

    def _begin(self, request: SampleRequest, future: asyncio.Future[Completion]) -> None:
        if future.done():
            return
        name = request.request_id
        most_tokens = request.sampling.max_new_tokens
        self._share.begin(len(request.prompt_token_ids), most_tokens)
        self._sampling[name] = future
        sampling = self._engine.sample(request)
        sampling.add_done_callback(lambda _: self._ended(name, most_tokens, sampling, future))
        future.add_done_callback(lambda _: sampling.cancel())

    def _ended(
        self, name: str, most_tokens: int, sampling: asyncio.Future[Completion], future: asyncio.Future[Completion]
    ) -> None:
        del self._sampling[name]
        self._changed.set()
        num_tokens = self._seen.pop(name, 0)
        error = None if sampling.cancelled() else sampling.exception()
        if not sampling.cancelled() and error is None:
            num_tokens = len(sampling.result().token_ids)
        self._ended_tokens += num_tokens
        self._share.end(most_tokens - num_tokens)
        if future.done():
            return
        if sampling.cancelled():
            future.cancel()
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(sampling.result())


@asynccontextmanager
async def open_desk(engine: Engine, policies: Policies, slots: int) -> AsyncIterator[GuestDesk]:
    """A desk, as long as the context is open."""
    desk = GuestDesk(engine, policies, slots)
    running = asyncio.create_task(desk.run(), name="guests")
    try:
        yield desk
    finally:
        running.cancel()
        desk.end_all(EngineStopped("the service is stopping"))
        await asyncio.gather(running, return_exceptions=True)
