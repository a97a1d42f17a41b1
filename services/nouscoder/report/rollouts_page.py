"""rollouts.html: the rollouts in tokens/ of a run folder, whose tokens are coloured by ratio and clip.

The page holds the records as JSON; its script (rollouts.js) shows the list and the rollout that is chosen.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nouscoder.atomic_files import numbered
from nouscoder.report.markup import visible
from nouscoder.report.shell import html_page, section, tiles

# What a page holds at most, so that a browser can show it.
MAX_TOKENS = 400_000
PER_TOKEN = ("tokens", "versions", "ratios", "mismatches", "clipped")


def write_rollouts_page(run_folder: Path) -> Path:
    """Write rollouts.html into the run folder atomically."""
    page = run_folder / "rollouts.html"
    partial = run_folder / "rollouts.html.part"
    partial.write_bytes(rollouts_page(run_folder).encode("utf8"))
    os.replace(partial, page)
    return page


def rollouts_page(run_folder: Path, max_tokens: int = MAX_TOKENS) -> str:
    """The whole page."""
    rollouts = read_rollouts(run_folder)
    if rollouts:
        share = max_tokens // len(rollouts)
        rollouts = [_shortened(one, max(2, share)) for one in rollouts]
    facts = tiles({"batches": str(len({one["batch_id"] for one in rollouts})), "rollouts": str(len(rollouts))})
    return html_page(
        f"Rollouts of {run_folder.name}", facts, [section("Rollouts", _browser(rollouts))], assets=("page", "rollouts")
    )


def read_rollouts(run_folder: Path) -> list[dict[str, Any]]:
    """The records of the readable files of tokens/, in order of batches, each with its batch_id."""
    found = []
    for file in numbered(run_folder / "tokens", ".json").values():
        try:
            record = json.loads(file.read_text(encoding="utf8", errors="replace"))
            found += [{**one, "batch_id": record["batch_id"]} for one in record["rollouts"]]
        except (OSError, ValueError, KeyError, TypeError):  # removed meanwhile, or damaged
            continue
    return found


def _shortened(record: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """The record with its first and last tokens, `max_tokens` at most, and with texts that are safe to show."""
    size = len(record["tokens"])
    half = max_tokens // 2
    cut = {
        name: record[name] if size <= max_tokens else record[name][:half] + record[name][-half:] for name in PER_TOKEN
    }
    left_out = record["left_out"] + size - len(cut["tokens"])
    return {
        **record,
        **cut,
        "left_out": left_out,
        "tokens": [visible(token) for token in cut["tokens"]],
        "prompt": visible(record["prompt"]),
        "problem_id": visible(record["problem_id"]),
    }


def _browser(rollouts: list[dict[str, Any]]) -> str:
    if not rollouts:
        return '<p class="empty">There are no records of tokens yet: the learner writes some for each batch.</p>'
    # A "<" could end the script element.
    data = json.dumps(rollouts, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'{_FILTERS}<div class="scroll list"><table class="rollouts"><thead><tr>{_HEADS}</tr></thead><tbody></tbody>'
        f'</table></div><div class="rollout" aria-live="polite"></div>{_LEGEND}'
        f'<script type="application/json" id="rollouts-data">{data}</script>'
        "<noscript><p>This list needs its script, which is in the page.</p></noscript>"
    )


_COLUMNS = ("step", "versions", "reward", "advantage", "length", "clipped", "verdict", "problem")
_HEADS = "".join(f'<th scope="col"><button type="button">{name}</button></th>' for name in _COLUMNS)
_FILTERS = (
    '<form class="rollout-filters"><label>reward at least <input name="reward" type="number" step="any"></label>'
    '<label>at most <input name="reward_to" type="number" step="any"></label>'
    '<label>version from <input name="version" type="number" min="0"></label>'
    '<label>to <input name="version_to" type="number" min="0"></label>'
    '<label>tokens from <input name="tokens" type="number" min="0"></label>'
    '<label>to <input name="tokens_to" type="number" min="0"></label>'
    '<label>colours <select name="colours"><option value="ratios">ratio to the old policy</option>'
    '<option value="mismatches">learner to sampler</option><option value="versions">policy version</option></select>'
    "</label><output></output></form>"
)
_LEGEND = (
    '<p class="note">Ratio: pi_theta / pi_old in the step that trained on the rollout, 1 in the first step of a batch.'
    ' <span class="token down-1">below 0.98</span> <span class="token down-2">0.9</span>'
    ' <span class="token down-3">0.7</span> <span class="token up-1">above 1.02</span>'
    ' <span class="token up-2">1.1</span> <span class="token up-3">1.3</span>'
    ' <span class="token clipped">clipped</span> The pointer shows the values of a token.</p>'
)
