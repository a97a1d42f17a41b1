"""The settings with which each batch was trained.

batches/00000007.json has the settings with which the batch was trained. A run may be resumed with other settings, for
example another learning rate. A replay must train a batch with the settings of the first time, because other settings
would give other weights than the published ones.

INVARIANT: the settings of a batch never change once they are written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from nouscoder.atomic_files import numbered, remove, write_whole
from nouscoder.config import LearnerSection
from nouscoder.learner.state.saved_batches import SavedBatchError

_SETTINGS_SUFFIX = ".json"

# All settings of the learner's section that the arithmetic of a step depends on, except device and number of threads.
_ARITHMETIC = {
    *("objective", "correction", "reference_kl", "entropy", "advantage"),
    *("steps_per_batch", "learning_rate", "matrix_learning_rate", "schedule", "weight_decay", "adam_betas"),
    *("max_gradient_norm", "skip_gradient_norm", "microbatch_tokens", "replay_batches", "reward_model"),
}


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The settings in the folder batches/, next to the saved batches."""

    folder: Path

    def fix(self, batch_id: int, current: LearnerSection) -> LearnerSection:
        """The settings to train a batch with: those of the first time, else `current`, which are then stored.

        Raises StorageError, or SavedBatchError when the stored settings cannot be used.
        """
        kept = self.kept(batch_id, current)
        if kept is None:
            write_whole(self._path(batch_id), current.model_dump_json(include=_ARITHMETIC, indent=1).encode())
        return kept or current

    def kept(self, batch_id: int, current: LearnerSection) -> LearnerSection | None:
        """`current` with the settings of the batch's first training; None before that. Raises SavedBatchError."""
        path = self._path(batch_id)
        if not path.exists():
            return None
        try:
            kept = json.loads(path.read_text(encoding="utf8"))
            return LearnerSection.model_validate({**current.model_dump(), **kept})
        except (OSError, ValueError, TypeError) as error:
            raise SavedBatchError(f"{path} does not hold the settings of a batch: {error}") from error

    def prune(self, oldest_batch: int) -> None:
        """Remove the settings of batches before `oldest_batch`."""
        for number, path in numbered(self.folder, _SETTINGS_SUFFIX).items():
            if number < oldest_batch:
                remove(path)

    def _path(self, batch_id: int) -> Path:
        return self.folder / f"{batch_id:08d}{_SETTINGS_SUFFIX}"
