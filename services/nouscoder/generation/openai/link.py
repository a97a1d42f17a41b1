"""Messages between the worker and the process of the API: one JSON object a line, over a socket pair.

The process of the API handles what strangers send, so the worker reads nothing from it but these messages.

    from the API   {"ready": true} or {"unusable": MESSAGE}, once
                   {"sample": {...}}, {"follow": ID}, {"cancel": ID}, {"counts": [...]}
                   {"claim": ID}, {"unclaim": ID}, {"give_back": SESSION}
                   {"turn": SESSION, "id": ID, ...}, {"close": SESSION, "id": ID, ...}
    to the API     {"start": {...}}, once; {"policy": VERSION}
                   {"id": ID, "tokens": {...}}, {"id": ID, "end": REASON, "tokens": {...}}, {"id": ID, "error": MESSAGE}
                   {"id": ID, "session": SESSION, "about": {...}}, {"id": ID, "closed": true}
                   {"session_ended": SESSION, "why": MESSAGE}
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

from nouscoder.domain.rollout import Sampling
from nouscoder.domain.tokens import Completion, FinishReason, SampledTokens, VersionSpan, float32, int32
from nouscoder.generation.engines.base import EngineError, EngineStopped, SampleRequest
from nouscoder.generation.environments.agent import AgentFault

_MOST_BYTES = 64 * 1024**2  # of a message: a prompt or a completion of a million tokens has 10 MiB

Record = dict[str, Any]


class FrontLink:
    """One end. Its messages are small or few, so nobody waits until they have left."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def on(cls, end: socket.socket) -> FrontLink:
        """The link of one end of a socket pair."""
        return cls(*await asyncio.open_connection(sock=end, limit=_MOST_BYTES))

    def send(self, record: Record) -> None:
        """Send a message; nothing happens when the other end is gone."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")

    async def records(self) -> AsyncIterator[Record]:
        """The messages, until the other end is gone."""
        try:
            while line := await self._reader.readline():
                yield json.loads(line)
        except (OSError, ValueError):  # also the half of a line
            return

    def close(self) -> None:
        """Close this end, which ends the other one's messages."""
        self._writer.close()


# The records of domain values.


def request_record(request: SampleRequest) -> Record:
    """A request, without the stop tokens, which are the same for all."""
    sampling = request.sampling
    return {
        "id": request.request_id,
        "prompt": list(request.prompt_token_ids),
        "sampling": [sampling.temperature, sampling.top_p, sampling.max_new_tokens, sampling.seed],
        "stops": sorted(request.stop_token_ids),
    }


def request_of(record: Record) -> SampleRequest:
    """The request of a guest."""
    temperature, top_p, max_new_tokens, seed = record["sampling"]
    return SampleRequest(
        request_id=record["id"],
        prompt_token_ids=tuple(map(int, record["prompt"])),
        sampling=Sampling(temperature, top_p, max_new_tokens, seed),
        stop_token_ids=frozenset(record["stops"]),
        is_guest=True,
    )


def end_record(name: str, completion: Completion) -> Record:
    """The end of a sample."""
    return {"id": name, "end": completion.finish_reason.value, "tokens": tokens_record(completion)}


def completion_of(record: Record) -> Completion:
    """The completion in the end of a sample."""
    return tokens_of(record["tokens"]).ended(FinishReason(record["end"]))


def error_record(name: str, error: BaseException) -> Record:
    """The error of a sample, or of a request of an agent."""
    return {"id": name, "error": str(error), "kind": type(error).__name__}


def error_of(record: Record) -> Exception:
    """The error in a record."""
    kinds = {kind.__name__: kind for kind in (EngineStopped, AgentFault)}
    return kinds.get(record["kind"], EngineError)(record["error"])


def tokens_record(tokens: SampledTokens) -> Record:
    """Sampled tokens."""
    return {
        "ids": tokens.token_ids.tolist(),
        "logprobs": tokens.logprobs.tolist(),
        "versions": [[span.policy_version, span.num_tokens] for span in tokens.versions],
    }


def tokens_of(record: Record) -> SampledTokens:
    """Sampled tokens. Raises ValueError when they disagree."""
    spans = tuple(VersionSpan(version, number) for version, number in record["versions"])
    return SampledTokens(int32(record["ids"]), float32(record["logprobs"]), spans)
