"""Drops problems that say the same as another one in other words: their prompts' embeddings point the same way."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from nouscoder.data.asking import ServedModel, ask_all, open_answers
from nouscoder.data.filters.near_duplicates import prompts_of
from nouscoder.data.filters.step import Candidate, CannotFilter, Context, Step, StepOutcome
from nouscoder.openai_server import OpenAIServer
from nouscoder.record_log import key_of

Vector = NDArray[np.float32]

_BLOCK_ROWS = 256  # bounds the memory of similarities: 24 MiB for 24,000 problems


@dataclass(frozen=True, slots=True)
class EmbeddingQuestion:
    """A request of the embedding of a text."""

    served: ServedModel
    text: str

    @property
    def key(self) -> str:
        """See Question."""
        return key_of({"model": self.served.model, "text": self.text})

    async def ask(self, server: OpenAIServer) -> dict[str, Any]:
        """See Question."""
        [vector] = await server.embed(self.served.model, [self.text])
        return {"answer": base64.b64encode(np.array(vector, "<f4").tobytes()).decode()}


def vector_of(record: dict[str, Any]) -> Vector:
    """The vector in the record of an answer."""
    return np.frombuffer(base64.b64decode(record["answer"]), "<f4").astype(np.float32)


class EmbeddingDuplicates(Step):
    """Drops a problem whose prompt is near that of an earlier one that is kept, or of an evaluation problem."""

    filter: Literal["embedding_duplicates"]
    embedder: ServedModel = Field(description="the model that embeds: {url, model}")
    threshold: float = Field(0.95, gt=0, le=1, description="cosine similarity from which two prompts are near")
    against: list[str] = Field([], description="problem files of evaluation sets")
    instruction: str = Field("", description="text before each prompt, as some models want it")
    at_once: int = Field(16, ge=1, exclude=True, description="requests at the same time")

    def files(self) -> tuple[str, ...]:
        """See Step."""
        return tuple(self.against)

    def apply(self, candidates: Sequence[Candidate], context: Context) -> StepOutcome:
        """See Step. Raises NotAnswered."""
        fixed = [
            (f"{name}: {problem_id}", prompt)
            for name in self.against
            for problem_id, prompt in prompts_of(context.folder / name)
        ]
        named = [*fixed, *((one.problem_id, one.prompt) for one in candidates)]
        questions = [EmbeddingQuestion(self.embedder, self.instruction + prompt) for _, prompt in named]
        with open_answers(context.evidence) as answers:
            ask_all(questions, answers, self.at_once, "embedding")
            vectors = [vector_of(answers.get(question.key)) for question in questions]
        if len({len(vector) for vector in vectors}) > 1:
            raise CannotFilter(f"{self.embedder.model} gave vectors of different lengths; delete {context.evidence}")
        dropped = {}
        found = near_earlier(np.stack(vectors), len(fixed), self.threshold) if vectors else []
        for one, near in zip(candidates, found, strict=True):
            if near is not None:
                dropped[one.problem_id] = f"near-duplicate: of {named[near[0]][0]}, similarity {near[1]:.3f}"
        return StepOutcome(dropped)


def near_earlier(vectors: Vector, num_fixed: int, threshold: float) -> list[tuple[int, float] | None]:
    """For each row after the first `num_fixed`: the nearest earlier row that is kept, if it is near.

    (its number, the cosine similarity), or None; then the row itself is kept. `vectors` [rows, size]; the fixed rows
    are always kept. A vector of zeros is near to nothing.
    """
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
    kept = np.zeros(len(unit), dtype=bool)
    kept[:num_fixed] = True
    found: list[tuple[int, float] | None] = []
    for first in range(num_fixed, len(unit), _BLOCK_ROWS):
        block = unit[first : first + _BLOCK_ROWS]
        similarities = block @ unit[: first + len(block)].T
        for row, own in enumerate(similarities, first):
            earlier = np.where(kept[:row], own[:row], -1.0)
            best = int(np.argmax(earlier)) if row else -1
            near = best >= 0 and earlier[best] >= threshold
            kept[row] = not near
            found.append((best, float(earlier[best])) if near else None)
    return found
