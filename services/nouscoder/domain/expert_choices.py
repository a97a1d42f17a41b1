"""The experts that a mixture-of-experts policy chose for the tokens that it read.

Generation records them, and the learner computes with the same experts (router replay, "R3", arXiv 2510.11370), because
a small difference of arithmetic or weights can send a token to other experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The formats of one byte (up to 256 experts) and of two.
_FORMATS = ("B", "H")


@dataclass(frozen=True, slots=True)
class ExpertChoices:
    """`ids` [positions, layers, top_k] in one flat array of format "B" or "H", in the order of the router's output.

    Position p belongs to token p of the sequence. Only layers with experts count. Raises ValueError on construction
    when the array has another form.
    """

    ids: memoryview[int]
    num_layers: int
    top_k: int

    def __post_init__(self) -> None:
        size = self.num_layers * self.top_k
        if self.ids.format not in _FORMATS or self.ids.ndim != 1 or size < 1 or len(self.ids) % size:
            raise ValueError(
                f"{len(self.ids)} expert ids of format {self.ids.format} are not {self.num_layers} layers of"
                f" {self.top_k} for each position"
            )

    @property
    def num_positions(self) -> int:
        """Tokens that the policy read."""
        return len(self.ids) // (self.num_layers * self.top_k)

    def between(self, start: int, end: int) -> ExpertChoices:
        """Those of the positions start .. end - 1."""
        size = self.num_layers * self.top_k
        return ExpertChoices(self.ids[start * size : end * size], self.num_layers, self.top_k)

    def last(self, num_positions: int) -> ExpertChoices:
        """Those of the last `num_positions`. Raises ValueError when there are fewer."""
        if num_positions > self.num_positions:
            raise ValueError(f"{self.num_positions} tokens have recorded experts, not {num_positions}")
        return self.between(self.num_positions - num_positions, self.num_positions)


def joined(parts: Sequence[ExpertChoices]) -> ExpertChoices:
    """Choices of consecutive positions as one. Raises ValueError when there are none, or of different policies."""
    kinds = {(part.ids.format, part.num_layers, part.top_k) for part in parts}
    if len(kinds) != 1:
        raise ValueError(f"expert choices to be joined have {len(kinds)} forms, not one")
    ((kind, num_layers, top_k),) = kinds
    if len(parts) == 1:
        return parts[0]
    ids = memoryview(b"".join(part.ids for part in parts)).cast(kind)  # type: ignore[call-overload]
    return ExpertChoices(ids, num_layers, top_k)
