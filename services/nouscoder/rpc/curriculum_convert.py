"""The curriculum's state, protocol <-> domain."""

from __future__ import annotations

from nouscoder.domain.curriculum import CurriculumState, ProblemStatistics
from nouscoder.v1 import broker_pb2


def curriculum_to(state: CurriculumState) -> broker_pb2.CurriculumState:
    """Domain -> protocol."""
    return broker_pb2.CurriculumState(cursor=state.cursor, problems=map(_problem_to, state.problems))


def curriculum_from(message: broker_pb2.CurriculumState) -> CurriculumState:
    """Protocol -> domain."""
    return CurriculumState(message.cursor, tuple(map(_problem_from, message.problems)))


def _problem_to(record: ProblemStatistics) -> broker_pb2.ProblemStatistics:
    return broker_pb2.ProblemStatistics(
        problem_id=record.problem_id,
        groups=record.groups,
        filtered=record.filtered,
        sampled=record.sampled,
        accepted=record.accepted,
        solved_in_row=record.solved_in_row,
        place=record.place,
        history=[broker_pb2.GroupOutcome(accepted=accepted, sampled=sampled) for accepted, sampled in record.history],
    )


def _problem_from(message: broker_pb2.ProblemStatistics) -> ProblemStatistics:
    return ProblemStatistics(
        problem_id=message.problem_id,
        groups=message.groups,
        filtered=message.filtered,
        sampled=message.sampled,
        accepted=message.accepted,
        solved_in_row=message.solved_in_row,
        place=message.place,
        history=tuple((outcome.accepted, outcome.sampled) for outcome in message.history),
    )
