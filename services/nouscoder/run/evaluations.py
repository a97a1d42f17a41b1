"""The evaluations of a run on its disk, and the policy with the best one.

evaluation_before.json and evaluation_after.json hold those of the first and the last policy. evaluations/00000012.json
holds that of version 12, measured during the run.

INVARIANT: the weights of the best evaluated policy of a run are on its disk: its first policy, a folder of kept/, or
(the last policy) the newest of policies/. Its checkpoint is too: in kept/, or (the last policy) the newest of
checkpoints/; the first policy has none. After `drop_worse` kept/ holds no other.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from nouscoder.atomic_files import numbered, remove
from nouscoder.config import Config
from nouscoder.domain.plan import Evaluated, best_of
from nouscoder.errors import NousCoderError
from nouscoder.policy_folder.compose import has_weights, link_weights

DURING = "evaluations"
_KEPT = "kept"
_CHECKPOINT = ".checkpoint"  # the learner writes these folders of kept/
_OF_A_VERSION = re.compile(r"\d{8}(\.|$)")
_POLICIES = "policies"  # the learner writes them


class NoSuchVersion(NousCoderError):
    """The weights of a policy version are not on the disk any more. The message names it."""


def evaluation_file(policy_version: int) -> str:
    """The name of the record of an evaluation during the run, in the run folder."""
    return f"{DURING}/{policy_version:08d}.json"


def recorded_evaluations(run: Path) -> tuple[Evaluated, ...]:
    """All evaluations of a run folder, one a version, in order of versions. Raises NousCoderError for a damaged one."""
    files = [run / "evaluation_before.json", *numbered(run / DURING, ".json").values(), run / "evaluation_after.json"]
    found = {each.policy_version: each for file in files if file.is_file() for each in [_read(file)]}
    return tuple(found[version] for version in sorted(found))


def keep_weights(run: Path, policy_version: int) -> None:
    """Keep the weights of a published policy. Call it before the policy is measured, while the learner has them."""
    link_weights(run / _KEPT / _number(policy_version), run / _POLICIES / _number(policy_version))


def kept_checkpoint_folder(run: Path, policy_version: int) -> Path:
    """Where the checkpoint of a version is, when the learner has kept it."""
    return run / _KEPT / f"{_number(policy_version)}{_CHECKPOINT}"


def drop_worse(run: Path) -> None:
    """Remove what is kept of all policies but the best one, and what a crash left incomplete.

    Call it after a policy was measured and recorded, and while the learner keeps none.
    """
    kept, best = run / _KEPT, best_of(recorded_evaluations(run)).policy_version
    stay = {_number(best), kept_checkpoint_folder(run, best).name}
    for folder in [*kept.iterdir()] if kept.is_dir() else []:
        if _OF_A_VERSION.match(folder.name) and folder.name not in stay:
            remove(folder)


def weights_folder(config: Config, policy_version: int) -> Path:
    """The folder that holds the weights of a version of a run. Raises NoSuchVersion naming those that are there."""
    run, first = config.run.folder, config.in_run_folder(config.policy.path)
    if policy_version == 0:
        return first
    for parent in (_POLICIES, _KEPT):
        folder = run / parent / _number(policy_version)
        if has_weights(folder):
            return folder
    there = sorted({0, *numbered(run / _POLICIES), *numbered(run / _KEPT)})
    raise NoSuchVersion(
        f"the weights of version {policy_version} are not in {run}: there are versions {', '.join(map(str, there))}"
    )


def newest_version(config: Config) -> int:
    """The newest version that the learner has published; 0 when there is none."""
    return max(numbered(config.run.folder / _POLICIES), default=0)


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
