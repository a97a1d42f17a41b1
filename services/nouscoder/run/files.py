"""Names of files in a run folder by which processes that never start each other meet."""

from __future__ import annotations

# Written by the coordinator when the first policy has been measured; a learner that was not started by it waits for it.
EVALUATION_BEFORE = "evaluation_before.json"
