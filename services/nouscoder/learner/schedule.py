"""The learning rate of each step: linear warm-up, then constant or a cosine down to a floor."""

from __future__ import annotations

import math

from nouscoder.config import DecayKind, ScheduleSection


def learning_rate_factor(schedule: ScheduleSection, step: int) -> float:
    """The factor on learner.learning_rate for the step after `step` steps, in (0, 1].

    Warm-up: (step + 1) / (warmup_steps + 1). Cosine (Loshchilov and Hutter, arXiv 1608.03983, equation 5): from 1 at
    the end of the warm-up to `floor` at decay_steps, and `floor` after it.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    if schedule.decay is DecayKind.CONSTANT:
        return 1.0
    done = min(1.0, (step - schedule.warmup_steps) / (schedule.decay_steps - schedule.warmup_steps))
    return schedule.floor + (1.0 - schedule.floor) * (1.0 + math.cos(math.pi * done)) / 2.0
