"""What `nouscoder data stats` prints: the statistics of a run's problems."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from nouscoder.cli.status_text import broker_of
from nouscoder.config import Config
from nouscoder.domain.problem_statistics import CurriculumState, ProblemStatistics
from nouscoder.errors import NousCoderError
from nouscoder.learner.state.curriculum_copy import FILE, read_copy

_HEAD = ("problem", "groups", "filtered", "sampled", "accepted", "pass rate", "in a row", "last groups")


class NoStatistics(NousCoderError):
    """There are no statistics of the run; the message says where they were looked for."""


async def stats_text(config: Config, *, live: bool, limit: int, as_json: bool) -> str:
    """The statistics of the run `config.run.name`: `live` from its broker, else from the copy in the run folder.

    Without a copy the broker is asked. Raises NoStatistics, and PeerError when the broker does not answer.
    """
    file = config.run.folder / FILE
    try:
        state = None if live else read_copy(file)
    except ValueError as error:
        raise NoStatistics(str(error)) from error
    source = str(file)
    if state is None:
        source = f"the broker at {config.broker.grpc}"
        async with broker_of(config) as broker:
            run, state = await broker.read_curriculum()
        if run != config.run.name:
            raise NoStatistics(f"{source} serves run {run}, not {config.run.name}: give its address with --broker")
    records = sorted(state.problems, key=lambda record: (record.pass_rate, record.problem_id))
    if as_json:
        return json.dumps([_as_json(record) for record in records], indent=1)
    return "\n".join([f"from {source}", *_summary(state), *_table(records[:limit] if limit else records)])


def _as_json(record: ProblemStatistics) -> dict[str, object]:
    """A record of a file of pass rates (data/pass_rates.py), with the other facts."""
    facts = asdict(record)
    counts = {"problem_id": facts.pop("problem_id"), "passed": facts.pop("accepted"), "sampled": facts.pop("sampled")}
    return counts | facts | {"pass_rate": record.pass_rate, "last_pass_rate": record.last_pass_rate}


def _summary(state: CurriculumState) -> list[str]:
    records = state.problems
    groups, filtered = sum(r.groups for r in records), sum(r.filtered for r in records)
    sampled, accepted = sum(r.sampled for r in records), sum(r.accepted for r in records)
    always = sum(r.accepted == r.sampled for r in records)
    never = sum(not r.accepted for r in records)
    return [
        f"{len(records)} problems with complete groups, curriculum at place {state.cursor}",
        f"{groups} groups, {filtered} filtered; {sampled} rollouts graded, {accepted} accepted",
        f"{always} problems always solved, {never} never",
    ]


def _table(records: Sequence[ProblemStatistics]) -> list[str]:
    """Aligned columns, the lowest pass rate first."""
    rows = [_HEAD, *map(_row, records)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(record: ProblemStatistics) -> tuple[str, ...]:
    counts = (record.groups, record.filtered, record.sampled, record.accepted)
    last = " ".join(f"{accepted}/{sampled}" for accepted, sampled in record.history)
    return (record.problem_id, *map(str, counts), f"{record.pass_rate:.3f}", str(record.solved_in_row), last)
