"""Checkpoints that are kept apart from the newest ones: of the best evaluated policy, and of the one being measured.

A kept checkpoint is made of hard links to the files of an ordinary one, so it costs no writing, and no pruning of the
ordinary ones removes it. The learner makes them; the run's evaluations remove those that are not the best.

INVARIANT: kept/VERSION.checkpoint has every file of the checkpoint after that version, or does not exist.
"""

from __future__ import annotations

from pathlib import Path

from nouscoder.atomic_files import link_or_copy, whole_folder
from nouscoder.learner.checkpoint import Checkpoint

_SUFFIX = ".checkpoint"


def keep_checkpoint(kept: Path, checkpoint: Checkpoint) -> Path:
    """Keep a checkpoint in the folder `kept`. Returns its folder there. Raises StorageError."""
    to = kept / f"{checkpoint.progress.policy_version:08d}{_SUFFIX}"
    with whole_folder(to) as part:
        for file in sorted(checkpoint.path.iterdir()):
            link_or_copy(file, part / file.name)
    return to
