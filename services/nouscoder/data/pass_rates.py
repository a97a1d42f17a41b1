"""Pass rates: for each problem, how many of its samples passed. They come from an evaluation or from a run.

    FILE.jsonl, FILE.json      one {"problem_id", "passed", "sampled"} for each problem, as JSON lines or as one array
    EVALUATION                 the folder of `nouscoder eval`, its report.json or its verdicts.jsonl; of several
                               profiles the first counts
    runs/NAME                  the folder of a run: what it has trained on; without that, its last evaluation
    evaluations/00000010.json  the record of an evaluation during a run

The policy is any: the base policy (NousCoder's and Skywork-OR1's offline filters), a strong model (Klear-Reasoner), or
that of a run (`nouscoder data stats RUN --json` prints such a file). Several records of one problem are added up. Other
fields are ignored.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, model_validator

from nouscoder.data.bounded_files import FileRefused
from nouscoder.data.json_records import BadRecord, UnreadableFile, bounded_json, checked, checked_records
from nouscoder.domain.curriculum import CurriculumState
from nouscoder.formats.body import Body
from nouscoder.formats.json_values import RepeatedKey
from nouscoder.input_file import regular

_REPORT = "report.json"
_VERDICTS = "verdicts.jsonl"  # beside report.json; equal answers share a line, so it does not have the counts
_OF_A_RUN = ("curriculum.json", "evaluation_after.json", "evaluation_before.json")


class PassRateBody(Body):
    """One record of a file of pass rates."""

    model_config = ConfigDict(extra="ignore")

    problem_id: str = Field(min_length=1)
    passed: int = Field(ge=0)
    sampled: int = Field(ge=1)

    @model_validator(mode="after")
    def _at_most_all(self) -> PassRateBody:
        if self.passed > self.sampled:
            raise ValueError(f"passed {self.passed} is more than sampled {self.sampled}")
        return self


@dataclass(frozen=True, slots=True)
class PassCount:
    """Rollouts of one problem, and how many of them passed."""

    passed: int
    sampled: int

    @property
    def rate(self) -> float:
        """The share that passed."""
        return self.passed / self.sampled


def read_pass_rates(path: Path) -> dict[str, PassCount]:
    """The counts of each problem. Raises BadRecord and UnreadableFile."""
    found: dict[str, PassCount] = {}
    for body in _records(path):
        earlier = found.get(body.problem_id, PassCount(0, 0))
        found[body.problem_id] = PassCount(earlier.passed + body.passed, earlier.sampled + body.sampled)
    return found


def pass_rates_file(path: Path) -> Path:
    """The file that holds the pass rates of `path`, which may be a folder or verdicts.jsonl. Raises UnreadableFile."""
    folder = path.parent if path.name == _VERDICTS else path
    if path.name != _VERDICTS and not path.is_dir():
        return path
    if (folder / _REPORT).is_file():
        return folder / _REPORT
    if not (folder / "config.toml").is_file():
        raise UnreadableFile(
            f"{folder} has no {_REPORT}: give a finished evaluation; end the evaluation with the same nouscoder eval"
            " command"
        )
    for name in _OF_A_RUN:
        if (folder / name).is_file() and any(True for _ in _counts(_object(folder / name))):
            return folder / name
    raise UnreadableFile(
        f"{folder} is the folder of a run without pass rates: it has trained on no problem, and has no evaluation that"
        " names each problem"
    )


def _records(path: Path) -> Iterator[PassRateBody]:
    file = pass_rates_file(path)
    record = _object(file) if file.suffix == ".json" else {}
    if "problems" not in record:
        if "pass_at_1" in record:
            raise BadRecord(f"{file}, problems: are missing, because an earlier release wrote it")
        yield from checked_records(file, PassRateBody)
        return
    for number, counts in enumerate(_counts(record), 1):
        yield checked(PassRateBody, counts, f"{file}, problems, record {number}")


def _object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; {} for a file with something else, such as an array or JSON lines."""
    try:
        value = bounded_json(regular(file).read_bytes().removeprefix(BOM_UTF8))
    except (OSError, FileRefused, RepeatedKey) as error:
        raise UnreadableFile(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _counts(record: dict[str, Any]) -> Iterable[Any]:
    """The unchecked counts of each problem in curriculum.json, in the report or in the record of an evaluation."""
    problems = record.get("problems")
    if isinstance(problems, dict):
        state = CurriculumState.of_records(0, problems.items())
        return [
            {"problem_id": one.problem_id, "passed": one.accepted, "sampled": one.sampled}
            for one in state.problems
            if one.sampled
        ]
    return [_of_report(one) for one in problems] if isinstance(problems, list) else []


def _of_report(one: Any) -> Any:
    """Counts in the form of PassRateBody. A problem of report.json has the accepted samples by profile."""
    if not isinstance(one, dict) or not isinstance(one.get("accepted"), dict):
        return one
    return {"passed": next(iter(one["accepted"].values()), None), "sampled": one.get("num_samples"), **one}
