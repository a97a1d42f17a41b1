"""What the first policy of a run was, so that another one in its place is refused when the run goes on.

first_policy.json in the run folder has the digests of its tokenizer, and of its weights where the run reads them again:
as the base of adapters, and as the reference policy.

INVARIANT: a learner that has started trains on the policy with which its run began. A run of an earlier release has no
file; its next start makes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nouscoder.atomic_files import write_whole
from nouscoder.config import Config
from nouscoder.errors import Unusable
from nouscoder.input_file import read_json_object
from nouscoder.learner.state.run_files import RunFiles
from nouscoder.policy_folder.identity import differing_file, tokenizer_digests, weights_digest
from nouscoder.policy_folder.weights_files import weights_files

FILE = "first_policy.json"


def require_first_policy(config: Config, *, reads_weights_again: bool) -> None:
    """Note what the first policy is, or compare it with the note. Hold the folder's lock. Raises Unusable."""
    files = RunFiles.of(config)
    note = files.run / FILE
    known: Mapping[str, Any] = read_json_object(note, Unusable) if note.exists() else {}
    found: dict[str, Any] = dict(known) | {"tokenizer": [*tokenizer_digests(files.policy)]}
    if reads_weights_again:
        found["weights"] = weights_digest(weights_files(files.policy))
    changed = differing_file(known.get("tokenizer", found["tokenizer"]), found["tokenizer"])
    if changed is None and known.get("weights", found.get("weights")) != found.get("weights"):
        changed = "a tensor"
    if changed is not None:
        raise Unusable(
            f"policy.path: {changed} in {files.policy} changed after the run in {files.run} began: put it back,"
            " or give the run another run.name"
        )
    if found != known:
        write_whole(note, json.dumps(found, indent=1).encode() + b"\n")
