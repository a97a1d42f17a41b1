"""The tokens of a rollout in progress: given to the policy, or sampled from it.

INVARIANT: each token is recorded once, as given or sampled. Later turns are sampled after exactly these tokens, and the
finished rollout holds exactly these tokens. Text is never tokenised a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from nouscoder.domain.rollout import Rollout, Task, assemble_rollout
from nouscoder.domain.tokens import Completion, int32
from nouscoder.generation.engines.base import SampleRequest
from nouscoder.generation.environments.base import Sampler, TaskRefused


class Episode:
    """A rollout in progress. `give` and `sample` append tokens; `finished` makes the rollout."""

    def __init__(self, task: Task, sampler: Sampler, stop_token_ids: frozenset[int]) -> None:
        self._task = task
        self._sampler = sampler
        self._stop_token_ids = stop_token_ids
        self._parts: list[memoryview[int] | Completion] = []
        self._tokens: list[int] = []
        self._num_turns = 0
        self._num_sampled = 0

    @property
    def tokens_left(self) -> int:
        """The number of tokens that may still be sampled: `max_new_tokens` is the limit of all turns together."""
        return self._task.sampling.max_new_tokens - self._num_sampled

    @property
    def num_tokens(self) -> int:
        """The number of tokens so far, given and sampled."""
        return len(self._tokens)

    def give(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample. They do not count in the loss."""
        if not token_ids:
            return
        given = int32(token_ids)
        last = self._parts[-1] if self._parts else None
        if last is None or isinstance(last, Completion):
            self._parts.append(given)
        else:
            self._parts[-1] = int32([*last, *given])
        self._tokens += token_ids

    async def sample(self, max_tokens: int | None = None) -> Completion:
        """Sample the next turn of at most `max_tokens` tokens after all tokens so far. Raises EngineError."""
        limit = self.tokens_left if max_tokens is None else min(max_tokens, self.tokens_left)
        request = SampleRequest(
            request_id=self._task.rollout_id if not self._num_turns else f"{self._task.rollout_id}/{self._num_turns}",
            prompt_token_ids=tuple(self._tokens),
            sampling=replace(self._task.sampling, seed=self._seed_of_turn(), max_new_tokens=limit),
            stop_token_ids=self._stop_token_ids,
        )
        completion = await self._sampler.sample(request)
        self._parts.append(completion)
        self._tokens += completion.token_ids
        self._num_turns += 1
        self._num_sampled += len(completion.token_ids)
        return completion

    def give_reply(self, reply: Sequence[int], max_tokens_total: int) -> bool:
        """Append the reply after which the policy writes its next turn. Returns whether there is another turn.

        There is none after an empty reply, and none without room for the reply and one sampled token:
        `max_tokens_total` is the engine's limit of given and sampled tokens.
        """
        if not reply or not self.tokens_left or self.num_tokens + len(reply) >= max_tokens_total:
            return False
        self.give(reply)
        return True

    def finished(self, text: str) -> Rollout:
        """The rollout, with the `text` to grade. Raises TaskRefused when the tokens are not a valid rollout."""
        try:
            return assemble_rollout(self._task, self._parts, text)
        except ValueError as error:
            raise TaskRefused(f"task {self._task.rollout_id}: {error}") from error

    def _seed_of_turn(self) -> int:
        """The seed of this turn's random stream, derived from the task's seed and the number of the turn."""
        seed = self._task.sampling.seed
        if not seed or not self._num_turns:
            return seed
        return int.from_bytes(blake2b(f"{seed}/{self._num_turns}".encode(), digest_size=8).digest(), "little")
