"""The batches of a fine-tuning on a set of examples: epochs in a random order of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nouscoder.domain.rollout import Rollout
from nouscoder.domain.supervised import EpochOrder


@dataclass(frozen=True, slots=True)
class EpochBatches:
    """The examples in the order of `order`."""

    examples: Sequence[Rollout]
    order: EpochOrder

    @property
    def num_steps(self) -> int:
        """Batches of all epochs."""
        return self.order.num_steps

    def at(self, step: int) -> list[Rollout]:
        """The examples of the batch after `step` others."""
        return [self.examples[number] for number in self.order.at(step)]
