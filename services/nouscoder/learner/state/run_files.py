"""Where the files of a run lie, and which run the folder holds.

identity.json has a random id that is made once. INVARIANT: the id of a run folder never changes, and no other folder
has it.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from nouscoder.atomic_files import write_whole
from nouscoder.config import Config
from nouscoder.domain.learner_state import RunIdentity
from nouscoder.errors import Unusable


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The paths of a run's files. `policy` holds the initial policy; the learner writes the others.

    checkpoints and policies hold one folder per checkpoint and per published version, batches one file per batch, kept
    the checkpoints that evaluations asked for. The run's evaluations keep weights there too.
    """

    run: Path
    policy: Path
    checkpoints: Path
    policies: Path
    kept: Path
    batches: Path

    @classmethod
    def of(cls, config: Config) -> RunFiles:
        """The paths for a configuration."""
        run, policy = config.run.folder, config.in_run_folder(config.policy.path)
        return cls(run, policy, run / "checkpoints", run / "policies", run / "kept", run / "batches")


FILE = "identity.json"
_RUN_ID = re.compile(r"[0-9a-f]{32}")


def open_identity(config: Config) -> RunIdentity:
    """The identity of the run, made when there is none. Hold the folder's lock. Raises Unusable and StorageError."""
    file = config.run.folder / FILE
    run_id = read_run_id(file)
    if run_id is None:
        run_id = secrets.token_hex(16)
        write_whole(file, json.dumps({"run_id": run_id}).encode() + b"\n")
    return RunIdentity(run_id, str(config.run.folder), config.run.seed, config.broker.group_size)


def read_run_id(file: Path) -> str | None:
    """The id in the file, None when there is no file. Raises Unusable."""
    try:
        found = json.loads(file.read_text(encoding="utf8"))["run_id"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unusable(f"{file} does not hold the identity of a run: {error}") from error
    if not isinstance(found, str) or not _RUN_ID.fullmatch(found):
        raise Unusable(f"{file} does not hold the identity of a run: run_id is {str(found)[:100]!r}")
    return found
