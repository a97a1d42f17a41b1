"""The learner's state: what was trained on, as the learner's disk records it. It restores what Redis has forgotten.

The disk holds checkpoints and saved batches, so this state survives every fault of Redis. A group is trained on as a
whole, in one batch, so it lists groups and not single rollouts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from nouscoder.domain.curriculum import CurriculumState
from nouscoder.domain.policy import PolicyManifest

_RUN_ID = re.compile(r"[0-9a-f]{1,64}")
_GROUP_ID = re.compile(r"g(\d{6,})")


def group_number(group_id: str) -> int:
    """The number of a group, counted from 0 over the run: g000012 is 12. Raises ValueError for any other form."""
    match = _GROUP_ID.fullmatch(group_id)
    if match is None:
        raise ValueError(f"{group_id[:100]!r} is not the id of a group: g and at least six digits")
    return int(match[1])


@dataclass(frozen=True, slots=True)
class TrainedGroups:
    """A set of group numbers as a bitmap. The highest bit of the first byte is group 0, as in Redis' SETBIT."""

    bits: bytes = b""

    def __contains__(self, number: int) -> bool:
        """Whether the group was trained on."""
        place, bit = divmod(number, 8)
        return place < len(self.bits) and bool(self.bits[place] >> (7 - bit) & 1)

    def plus(self, numbers: Iterable[int]) -> TrainedGroups:
        """With these groups too. Raises ValueError when one of them is in the set already."""
        wanted = sorted(numbers)
        bits = bytearray(self.bits)
        if wanted:
            bits.extend(bytes(max(0, wanted[-1] // 8 + 1 - len(bits))))
        for number in wanted:
            place, bit = divmod(number, 8)
            if bits[place] >> (7 - bit) & 1:
                raise ValueError(f"group {number} was trained on before")
            bits[place] |= 1 << (7 - bit)
        return TrainedGroups(bytes(bits))

    @property
    def next_group(self) -> int:
        """One more than the highest number in the set; 0 when it is empty."""
        number = int.from_bytes(self.bits, "big")
        return 8 * len(self.bits) + 1 - (number & -number).bit_length() if number else 0


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Which run this is. `run_id` is random and made once, in the run folder. The rest is for people.

    `folder` is where the learner keeps the run. `seed` and `group_size` cannot change within a run. Raises ValueError
    for a `run_id` of another form.
    """

    run_id: str
    folder: str
    seed: int
    group_size: int

    def __post_init__(self) -> None:
        if not _RUN_ID.fullmatch(self.run_id):
            raise ValueError("identity.run_id must have 1 to 64 lower-case hexadecimal digits")


@dataclass(frozen=True, slots=True)
class TrainedState:
    """What was trained on: the numbers of batches, optimizer steps and rollouts, and the groups.

    `policy` is the newest policy that was published; None before the first. `curriculum` is the last copy of
    the curriculum's state; it may be older than the rest.
    """

    identity: RunIdentity
    batches: int
    step: int
    rollouts: int
    groups: TrainedGroups
    policy: PolicyManifest | None
    curriculum: CurriculumState = CurriculumState()


@dataclass(frozen=True, slots=True)
class Restored:
    """What the broker did with the learner's state.

    `rollouts_lost`: admitted rollouts that are now neither final nor in flight.
    """

    was_behind: bool
    rollouts_lost: int = 0
