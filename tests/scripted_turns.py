"""A policy with scripted answers, in the demo's tokens, and the parts of a rollout."""

from __future__ import annotations

import asyncio

from nouscoder.demo.policy import EOS_ID, CharTokenizer
from nouscoder.domain.rollout import Rollout
from nouscoder.domain.tokens import Completion, FinishReason, float32, int32, spans_of
from nouscoder.generation.engines.base import SampleRequest


class ScriptedSampler:
    """Answers each request with the next scripted text and records the request. Each answer is of a newer policy."""

    def __init__(self, *texts: str, cut: bool = False) -> None:
        """With `cut` every answer ends at the limit of tokens, without a stop token."""
        self._texts = list(texts)
        self._cut = cut
        self.requests: list[SampleRequest] = []

    def sample(self, request: SampleRequest) -> asyncio.Future[Completion]:
        version = len(self.requests)
        self.requests.append(request)
        ids = [*CharTokenizer().encode(self._texts.pop(0)), *([] if self._cut else [EOS_ID])]
        reason = FinishReason.LENGTH if self._cut else FinishReason.STOP
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        future.set_result(Completion(int32(ids), float32([-1.0] * len(ids)), spans_of([version] * len(ids)), reason))
        return future


def parts_of(rollout: Rollout) -> list[tuple[bool, list[int]]]:
    """(is_sampled, token ids) of each segment."""
    found, start = [], 0
    for segment in rollout.segments:
        found.append((segment.is_sampled, rollout.token_ids[start : start + segment.num_tokens].tolist()))
        start += segment.num_tokens
    return found
