"""Reads a run folder. Files and keys may be missing, and last lines may be incomplete.

INVARIANT: every number that this module returns is finite. A value that is missing, NaN or not a number is None.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nouscoder.errors import Unusable
from nouscoder.input_file import regular
from nouscoder.recorded_evaluations import AFTER, BEFORE, EvaluatedSample, evaluation_files

Record = Mapping[str, Any]
Loads = Callable[..., object]


@dataclass(frozen=True, slots=True)
class EvaluationData:
    """evaluation_*.json, or one of evaluations/. `pass_at_k` has k above 1; `by_family`, `by_language` are pass@1."""

    pass_at_1: float | None
    policy_version: int | None
    num_problems: int | None
    num_rollouts: int | None
    by_family: dict[str, float]
    samples: tuple[EvaluatedSample, ...]
    standard_error: float | None = None
    pass_at_k: Mapping[int, float] = field(default_factory=dict)
    by_language: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """A rollout that was trained on. Policy versions `oldest_version` to `newest_version` sampled its tokens."""

    step: int | None
    problem_id: str
    prompt: str
    program: str
    verdict: str
    reward: float | None
    oldest_version: int | None
    newest_version: int | None
    staleness: int | None


@dataclass(frozen=True, slots=True)
class RunData:
    """A run folder. `metrics`: the last line of each step, in order; `evaluations`: those with a version, in order.

    `config` is its config.toml, `first_policy` the config.json of the model that it names; empty without a file.
    """

    name: str
    summary: Record
    metrics: tuple[Record, ...] = ()
    before: EvaluationData | None = None
    after: EvaluationData | None = None
    samples: tuple[TrainingSample, ...] = ()
    num_unreadable_lines: int = 0
    unreadable_files: tuple[str, ...] = field(default=())
    evaluations: tuple[EvaluationData, ...] = ()
    config: Record = field(default_factory=dict)
    first_policy: Record = field(default_factory=dict)

    def evaluated(self) -> dict[float, EvaluationData]:
        """The evaluations by the step at which their policy was made, in order; without those whose line was lost."""
        steps = {0: 0.0} | steps_of_versions(self.metrics)
        found = {steps[each.policy_version]: each for each in self.evaluations if each.policy_version in steps}
        if self.before is not None:
            found.setdefault(0.0, self.before)
        if self.after is not None and self.metrics:
            found.setdefault(number(self.metrics[-1], "step") or 0.0, self.after)
        return dict(sorted(found.items()))

    @property
    def is_empty(self) -> bool:
        """Whether the folder has nothing to show, not even a damaged file."""
        shown = (self.summary, self.metrics, self.before, self.after, self.evaluations, self.samples)
        return not (any(shown) or self.num_unreadable_lines or self.unreadable_files)


class NotARun(Unusable):
    """A folder is not that of a run. The message says why."""


def run_folder(folder: Path) -> Path:
    """`folder`, if it is that of a run. Raises NotARun."""
    if not folder.is_dir():
        raise NotARun(f"there is no folder {folder}")
    if (folder / "plan.json").is_file():
        stages = sorted(file.parent for file in folder.glob("*/metrics.jsonl"))
        raise NotARun(
            f"{folder} is the folder of a plan: "
            + (f"name one of its stages, such as {stages[0]}" if stages else "none of its stages has begun")
        )
    if any((regular(folder) / name).is_file() for name in ("config.toml", "metrics.jsonl")):
        return folder
    raise NotARun(f"{folder} is not a run folder: it has neither config.toml nor metrics.jsonl")


def read_run(folder: Path) -> RunData:
    """Read a run folder. Raises FileNotFoundError when there is no such folder."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a run folder")
    unreadable: list[str] = []
    config = _read_object(folder / "config.toml", unreadable, tomllib.loads) or {}
    summary = _read_object(folder / "summary.json", unreadable) or {}
    evaluations = {file.name: evaluation_of(_read_object(file, unreadable)) for file in evaluation_files(folder)}
    by_version = {each.policy_version: each for each in evaluations.values() if each is not None}
    metrics, torn_metrics = _read_lines(folder / "metrics.jsonl", unreadable)
    samples, torn_samples = _read_lines(folder / "samples.jsonl", unreadable)
    return RunData(
        name=str(summary.get("name") or folder.name),
        summary=summary,
        metrics=_by_step(metrics),
        before=evaluations[BEFORE],
        after=evaluations[AFTER],
        samples=tuple(_training_sample(record) for record in samples),
        num_unreadable_lines=torn_metrics + torn_samples,
        unreadable_files=tuple(unreadable),
        evaluations=tuple(by_version[version] for version in sorted(v for v in by_version if v is not None)),
        config=config,
        first_policy=_read_object(folder / str(value_at(config, "policy.path")) / "config.json", []) or {},
    )


def steps_of_versions(metrics: Iterable[Record]) -> dict[int, float]:
    """The last step of each policy version."""
    found = ((whole_number(line, "policy_version"), number(line, "step") or 0.0) for line in metrics)
    return {version: step for version, step in found if version is not None}


def number(record: Record, *names: str) -> float | None:
    """The first finite number under one of `names`. A dot in a name selects a field of an inner record."""
    for name in names:
        found = _finite(value_at(record, name))
        if found is not None:
            return found
    return None


def value_at(record: Record, name: str) -> Any:
    """What is under a name, as `number` finds it; None when nothing is."""
    value: Any = record
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def whole_number(record: Record, *names: str) -> int | None:
    """Like `number`, rounded to an integer."""
    value = number(record, *names)
    return None if value is None else round(value)


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _read_object(file: Path, unreadable: list[str], loads: Loads = json.loads) -> dict[str, Any] | None:
    try:
        record = json_record(file.read_text(encoding="utf8", errors="replace"), loads)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):  # a path with a zero byte, too
        record = None
    unreadable += [file.name] if record is None else []
    return record


def _read_lines(file: Path, unreadable: list[str]) -> tuple[list[dict[str, Any]], int]:
    """The records of a JSONL file, and the number of lines that are not a record."""
    try:
        text = file.read_text(encoding="utf8", errors="replace")
    except FileNotFoundError:
        return [], 0
    except OSError:
        unreadable.append(file.name)
        return [], 0
    records, torn = [], 0
    for line in text.split("\n"):
        if not line.strip():
            continue
        if (record := json_record(line)) is not None:
            records.append(record)
        else:
            torn += 1
    return records, torn


def json_record(text: str | bytes, loads: Loads = json.loads) -> dict[str, Any] | None:
    """The object in a JSON text, or in another one that `loads` reads; None for another text."""
    try:
        record = loads(text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _by_step(records: Iterable[Record]) -> tuple[Record, ...]:
    """The records in order of steps. Of a step that was written again after a restart, only the last record counts."""
    newest: dict[int, Record] = {}
    for record in records:
        step = whole_number(record, "step")
        if step is not None:
            newest[step] = record
    return tuple(newest[step] for step in sorted(newest))


def evaluation_of(record: Record | None) -> EvaluationData | None:
    """The evaluation in a record: a whole file, or only its figures."""
    if record is None:
        return None
    found = record.get("samples")
    listed = found if isinstance(found, list) else []
    names = ("problem_id", "family", "prompt", "program", "verdict")
    samples = tuple(
        EvaluatedSample(*(_text(item, name) for name in names)) for item in listed if isinstance(item, Mapping)
    )
    return EvaluationData(
        pass_at_1=number(record, "pass_at_1"),
        policy_version=whole_number(record, "policy_version"),
        num_problems=whole_number(record, "num_problems"),
        num_rollouts=whole_number(record, "num_rollouts"),
        by_family=_rates(record.get("by_family")) or _rates_of(samples),
        samples=samples,
        standard_error=number(record, "standard_error"),
        pass_at_k=_pass_at_k(record),
        by_language=_rates(record.get("by_language")),
    )


def _pass_at_k(record: Record) -> dict[int, float]:
    rates = _rates(record.get("pass_at_k"))
    return {int(k): rate for k, rate in rates.items() if k.isdecimal() and int(k) > 1}


def _rates(value: object) -> dict[str, float]:
    if not isinstance(value, Mapping):
        return {}
    rates = {str(name): _finite(rate) for name, rate in value.items()}
    return {name: rate for name, rate in rates.items() if rate is not None}


def _rates_of(samples: Iterable[EvaluatedSample]) -> dict[str, float]:
    passed: dict[str, list[bool]] = {}
    for sample in samples:
        passed.setdefault(sample.family, []).append(sample.accepted)
    return {family: sum(values) / len(values) for family, values in passed.items() if family}


def _training_sample(record: Record) -> TrainingSample:
    version_range = record.get("version_range")
    versions = [_finite(value) for value in version_range] if isinstance(version_range, list) else []
    oldest, newest = versions if len(versions) == 2 else (None, None)
    return TrainingSample(
        step=whole_number(record, "step"),
        problem_id=_text(record, "problem_id"),
        prompt=_text(record, "prompt"),
        program=_text(record, "program"),
        verdict=_text(record, "verdict"),
        reward=number(record, "reward"),
        oldest_version=None if oldest is None else round(oldest),
        newest_version=None if newest is None else round(newest),
        staleness=whole_number(record, "staleness"),
    )


def _text(record: Record, name: str) -> str:
    value = record.get(name)
    return "" if value is None else str(value)
