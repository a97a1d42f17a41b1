"""Which problems of a run gave no training, and why: the last lines of the run, untrained.json and the report.

INVARIANT: each training problem has one cause, or is in a trained batch with an advantage.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from nouscoder.broker.curriculum import open_curriculum
from nouscoder.config import Config
from nouscoder.data.problem_index import all_held_out, fitting, has_index, in_languages, open_index
from nouscoder.domain.curriculum import CurriculumState, ProblemStatistics
from nouscoder.domain.run_status import DeadLetter, GivenUpFor, RunStatus
from nouscoder.domain.signal import has_signal

FILE = "untrained.json"
_NAMED = 3  # problems of a cause in a line; the file has all
_OTHER_LANGUAGE = "in a language that problems.languages lacks"
_TOO_LONG = "with a longer prompt than max_tokens_total allows"
_NO_CODE = "no answer held code"
_NO_ADVANTAGE = "in batches with equal rewards alone, so without an advantage"
_NOT_WHOLE = "without a complete group: abandoned, too old, refused, or unfinished at the end"


@dataclass(frozen=True, slots=True)
class Untrained:
    """Problem ids by cause: of the `num_problems` training problems, and of the held-out problems not measured.

    `details` says more of a problem of some causes.
    """

    num_problems: int
    by_cause: Mapping[str, list[str]]
    not_measured: Mapping[str, list[str]]
    details: Mapping[str, str]

    def lines(self, folder: Path) -> list[str]:
        """For a person; none when every problem gave training and was measured."""
        number = sum(map(len, self.by_cause.values()))
        head = f"{number} of {self.num_problems} training problems gave no training, all in {folder / FILE}:"
        return [
            *([head] if self.by_cause else ()),
            *(f"  {self._line(cause, names)}" for cause, names in self.by_cause.items()),
            *(f"not measured, of the held-out problems: {self._line(*one)}" for one in self.not_measured.items()),
        ]

    def _line(self, cause: str, names: list[str]) -> str:
        detail = f" ({self.details[cause]})" if self.details.get(cause) else ""
        return f"{len(names)} {cause}{detail}: {', '.join(names[:_NAMED])}{', ...' * (len(names) > _NAMED)}"


def read_untrained(folder: Path) -> Untrained | None:
    """What untrained.json of a run holds; None for a run that has not ended, and for a damaged file."""
    try:
        return Untrained(**json.loads((folder / FILE).read_text(encoding="utf8")))
    except (OSError, ValueError, TypeError):
        return None


def untrained(config: Config, state: CurriculumState, letters: Iterable[DeadLetter], status: RunStatus) -> Untrained:
    """By the files of a run, and what its broker says at the end. Reads the problem files."""
    records = {one.problem_id: one for one in state.problems}
    failed = {one.problem_id: one for one in letters}
    found: dict[str, list[str]] = {}
    details = {_NOT_WHOLE: status.refused_reason}
    num_problems = status.num_problems + status.left_out_problems
    places: dict[str, int | None] = dict.fromkeys((*records, *failed), -1)
    if config.run.services == "local" or has_index(config):
        with closing(open_index(config)) as index:
            found = {_TOO_LONG: [*index.left_out], _OTHER_LANGUAGE: [*index.in_others]}
            names, num_problems = index.problem_ids, len(index.all_ids)
        schedule = open_curriculum(config, names).schedule
        first = {schedule.at(place).problem_id: place for place in reversed(range(schedule.end_of_round(0)))}
        places = {name: first.get(name) for name in names}
    trained, codeless = _trained(config), {one.problem_id for one in state.problems if one.no_code == one.sampled}
    for name, place in places.items():
        if not trained.get(name):
            own = _NO_CODE if name in codeless else _NO_ADVANTAGE if name in trained else ""
            cause = own or _cause(records.get(name), failed.get(name), place, state)
            found.setdefault(cause, []).append(name)
            if name in failed:
                details.setdefault(cause, failed[name].detail)
    return Untrained(num_problems, _without_empty(found), _not_measured(config), details)


def _cause(
    record: ProblemStatistics | None, failed: DeadLetter | None, place: int | None, state: CurriculumState
) -> str:
    if record is not None and record.filtered < record.groups:
        return "with complete groups that were too old, or left over at the end"
    if record is not None:
        of_all = {record.sampled: "every answer was accepted", 0: "no answer was accepted"}
        return f"filtered: {of_all.get(record.accepted, 'the rewards of each group were equal')}"
    if failed is not None:
        is_ours = failed.reason is GivenUpFor.INTERNAL_ERROR
        return "not graded: internal_error" if is_ours else "given up: their leases were lost too often"
    if place is None:
        return "left out by broker.curriculum"
    return _NOT_WHOLE if place < state.cursor else "not reached before the end"


def _trained(config: Config) -> dict[str, bool]:
    """The problems of the trained batches, and whether their rewards gave an advantage."""
    of_run: dict[str, bool] = {}
    advantage = config.learner.advantage
    always = advantage.estimator.is_of_batch or bool(advantage.length_weight)
    file = config.run.folder / "rewards.jsonl"
    for line in file.read_text(encoding="utf8").splitlines() if file.exists() else ():
        for name, rewards in json.loads(line)["rewards"].items():
            of_run[name] = of_run.get(name, False) or always or has_signal(rewards)
    return of_run


def _not_measured(config: Config) -> dict[str, list[str]]:
    held_out = all_held_out(config)
    asked = in_languages(config, held_out)
    others = {one.problem_id for one in held_out} - {one.problem_id for one in asked}
    return _without_empty({_TOO_LONG: [*fitting(config, asked)[1]], _OTHER_LANGUAGE: sorted(others)})


def _without_empty(found: Mapping[str, list[str]]) -> dict[str, list[str]]:
    return {cause: names for cause, names in found.items() if names}
