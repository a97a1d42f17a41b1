"""What `nouscoder runs` prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from nouscoder.run.runs import Found


def runs_text(runs: Sequence[Found], *, as_json: bool) -> str:
    """A line for each run."""
    if as_json:
        return json.dumps([asdict(run) | {"belongs_together": run.belongs_together} for run in runs], indent=1)
    return "\n".join(map(_line, runs)) or "there are no runs"


def removed_text(removed: Sequence[str], *, as_json: bool) -> str:
    """What was removed, a line each."""
    if as_json:
        return json.dumps({"removed": list(removed)}, indent=1)
    return "\n".join(f"removed {what}" for what in removed)


def _line(run: Found) -> str:
    parts = []
    if run.in_folder is not None:
        step = run.in_folder.step
        parts.append(f"folder {run.in_folder.folder}, {f'checkpoint of step {step}' if step else 'no checkpoint'}")
    if run.in_redis is not None:
        state = "finished" if run.in_redis.finished else "not finished"
        parts.append(f"Redis: {run.in_redis.batches} batches, step {run.in_redis.step}, {state}")
    if not run.belongs_together:
        parts.append("the folder and Redis hold different runs of this name")
    return f"{run.name}: {'; '.join(parts)}"
