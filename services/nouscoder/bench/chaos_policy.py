"""Writes a small random policy folder. A process of its own, because it loads torch: python -m ... FOLDER SEED."""

from __future__ import annotations

import sys
from pathlib import Path

from nouscoder.learner.model.synthetic import random_policy, write_policy_folder

if __name__ == "__main__":
    write_policy_folder(Path(sys.argv[1]), random_policy(int(sys.argv[2])))
