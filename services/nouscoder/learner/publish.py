"""Published policies: policies/00000007/model.safetensors, whole and checksummed.

INVARIANT: a published file never changes under its name while its version is among the newest `keep`; publishing the
same weights as the same version again gives the same manifest.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from safetensors.torch import save, save_file
from transformers import PreTrainedModel

from nouscoder.domain.policy import PolicyManifest
from nouscoder.learner.atomic_files import prune, sha256_of, whole_folder
from nouscoder.learner.weights import weights_of

WEIGHTS = "model.safetensors"


class PolicyPublisher:
    """The folder policies/. Old versions are kept for a while, as a generation worker may still be reading one."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def write(self, model: PreTrainedModel, policy_version: int, step: int) -> PolicyManifest:
        """Write the weights as a version and remove the oldest. Raises StorageError."""
        final = version_folder(self._folder, policy_version)
        file = final / WEIGHTS
        weights = weights_of(model)
        # After a crash the same version is often published again: its file may be being read, so it is left alone.
        if not (file.exists() and sha256_of(file) == hashlib.sha256(save(weights)).hexdigest()):
            with whole_folder(final) as part:
                save_file(weights, part / WEIGHTS)
        prune(self._folder, self._keep)
        return PolicyManifest(policy_version, str(file), sha256_of(file), file.stat().st_size, step)


def version_folder(folder: Path, policy_version: int) -> Path:
    """Where a version's weights are, in the folder policies/."""
    return folder / f"{policy_version:08d}"
