"""The evaluations of a run on the disk, and the policy with the best one.

INVARIANT: the weights of the best evaluated policy of a run are on its disk: its first policy, a folder of kept/, or
(the last policy) the newest of policies/. Its checkpoint is too: in kept/, or (the last policy) the newest of
checkpoints/; the first policy has none. After `drop_worse` kept/ holds no other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from nouscoder.atomic_files import numbered, remove, write_whole
from nouscoder.config import Config
from nouscoder.domain.plan import Evaluated, best_of
from nouscoder.errors import NousCoderError, Unusable
from nouscoder.policy_folder.compose import has_weights, link_weights
from nouscoder.recorded_evaluations import DURING, RecordedEvaluations, evaluation_files
from nouscoder.run.folder import POLICIES

_KEPT = "kept"
_CHECKPOINT = ".checkpoint"  # the learner writes these folders of kept/
_OF_A_VERSION = re.compile(r"\d{8}(\.|$)")


class NoSuchVersion(Unusable):
    """The weights of a policy version are not on the disk any more. The message names it."""


def evaluation_file(policy_version: int) -> str:
    """The name of the record of an evaluation during the run, in the run folder."""
    return f"{DURING}/{policy_version:08d}.json"


def recorded_evaluations(run: Path) -> tuple[Evaluated, ...]:
    """All evaluations of a run folder, one a version, in order of versions. Raises NousCoderError for a damaged one."""
    found = {each.policy_version: each for file in evaluation_files(run) if file.is_file() for each in [_read(file)]}
    return tuple(found[version] for version in sorted(found))


def log_evaluations(run: Path) -> None:
    """Put the evaluations that metrics.jsonl lacks into its last lines, the newest into the last.

    The learner logs an evaluation with the step after it, and there is none after the last. Call it when the learner
    has ended. Raises StorageError.
    """
    file = run / "metrics.jsonl"
    lines = [json.loads(text) for text in file.read_text(encoding="utf8").splitlines()] if file.exists() else []
    logged = {line["evaluation"]["policy_version"] for line in lines if "evaluation" in line}
    due = [each for each in RecordedEvaluations(run).figures() if each["policy_version"] not in logged]
    free = [line for line in reversed(lines) if "evaluation" not in line]
    if not due or not free:
        return
    for line, figures in zip(free, reversed(due), strict=False):
        line["evaluation"] = figures
    write_whole(file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())


def keep_weights(run: Path, policy_version: int) -> None:
    """Keep the weights of a published policy. Call it before the policy is measured, while the learner has them."""
    link_weights(run / _KEPT / _number(policy_version), run / POLICIES / _number(policy_version))


def kept_checkpoint_folder(run: Path, policy_version: int) -> Path:
    """Where the checkpoint of a version is, when the learner has kept it."""
    return run / _KEPT / f"{_number(policy_version)}{_CHECKPOINT}"


def put_off(run: Path, most: int) -> list[int]:
    """The versions that wait for their evaluation with whole weights and checkpoints: the first `most` of them."""
    kept = [version for version in numbered(run / _KEPT) if kept_checkpoint_folder(run, version).is_dir()]
    return [version for version in kept if not (run / evaluation_file(version)).exists()][:most]


def drop_worse(run: Path, waiting: Collection[int] = ()) -> None:
    """Remove all that is kept but of the best policy and those that wait. Call it while the learner keeps none."""
    kept, best = run / _KEPT, best_of(recorded_evaluations(run)).policy_version
    stay = {f"{_number(version)}{ending}" for version in (best, *waiting) for ending in ("", _CHECKPOINT)}
    for folder in [*kept.iterdir()] if kept.is_dir() else []:
        if _OF_A_VERSION.match(folder.name) and folder.name not in stay:
            remove(folder)


def weights_folder(config: Config, policy_version: int) -> Path:
    """The folder that holds the weights of a version of a run. Raises NoSuchVersion naming those that are there."""
    run, first = config.run.folder, config.in_run_folder(config.policy.path)
    if policy_version == 0:
        return first
    for parent in (POLICIES, _KEPT):
        folder = run / parent / _number(policy_version)
        if has_weights(folder):
            return folder
    there = sorted({0, *numbered(run / POLICIES), *numbered(run / _KEPT)})
    raise NoSuchVersion(
        f"the weights of version {policy_version} are not in {run}: there are versions {', '.join(map(str, there))}"
    )


def evaluated_of(record: dict[str, Any]) -> Evaluated:
    """The version and its pass@1 in the record of an evaluation."""
    return Evaluated(int(record["policy_version"]), float(record["pass_at_1"]))


def _read(file: Path) -> Evaluated:
    try:
        return evaluated_of(json.loads(file.read_text(encoding="utf8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NousCoderError(f"{file} is not the record of an evaluation: {error}") from error


def _number(policy_version: int) -> str:
    return f"{policy_version:08d}"
