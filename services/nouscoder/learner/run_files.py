"""Where the files of a run lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nouscoder.config import Config


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The paths of a run's files. `policy` holds the initial policy; the learner writes the others."""

    run: Path
    policy: Path

    @classmethod
    def of(cls, config: Config) -> RunFiles:
        """The paths for a configuration."""
        return cls(config.run.folder, config.in_run_folder(config.policy.path))

    @property
    def checkpoints(self) -> Path:
        """Holds one folder per checkpoint."""
        return self.run / "checkpoints"

    @property
    def policies(self) -> Path:
        """Holds one folder per published version."""
        return self.run / "policies"

    @property
    def kept(self) -> Path:
        """Holds the checkpoints that evaluations asked for. The run's evaluations keep weights there too."""
        return self.run / "kept"

    @property
    def batches(self) -> Path:
        """Holds one file per batch."""
        return self.run / "batches"
