"""`nouscoder objectives compare`: finds the policies of a recorded batch in its run folder, and writes the answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedModel

from nouscoder.config import Config, load_config
from nouscoder.errors import Unusable
from nouscoder.learner.compare import Comparison, compare
from nouscoder.learner.publish import version_folder
from nouscoder.learner.saved_batches import SavedBatches
from nouscoder.learner.weights import empty_model, load_model, put_weights
from nouscoder.policy_folder.policy_tensors import PolicyTensors, merge_experts
from nouscoder.policy_folder.weights_files import policy_files


def compare_file(file: Path, overrides: Sequence[str], policy: int | None, old_policy: int | None) -> list[Comparison]:
    """The comparison for runs/NAME/batches/NUMBER.batch, with the configuration of that run and `overrides`.

    `old_policy` is the version of pi_old, by default the one that trained on the batch. `policy` is the version of
    pi_theta, by default the one that the batch made. Raises Unusable naming what is missing, and WeightsUnusable.
    """
    run = file.resolve().parents[1]
    if not file.stem.isdigit() or not (run / "config.toml").exists():
        raise Unusable(f"{file} is not runs/NAME/batches/NUMBER.batch of a run folder")
    config = load_config(run / "config.toml", overrides)
    batch = SavedBatches(file.resolve().parent, keep=1).load(int(file.stem))
    old = batch.policy_version if old_policy is None else old_policy
    new = batch.policy_version + 1 if policy is None else policy
    return compare(_policy(config, run, new), _policy(config, run, old), batch, config.learner)


def _policy(config: Config, run: Path, version: int) -> PreTrainedModel:
    folder = config.policy.path if config.policy.path.is_absolute() else run / config.policy.path
    if version == 0:
        return load_model(folder)
    published = version_folder(run / "policies", version)
    if not published.is_dir():
        there = sorted(path.name for path in (run / "policies").glob("[0-9]*") if path.is_dir())
        raise Unusable(
            f"{published} is not there (kept: {', '.join(there) or 'none'}): choose others with --policy and"
            " --old-policy, or raise learner.keep_policies"
        )
    model = empty_model(folder)
    weights = dict(PolicyTensors(policy_files(published, folder)).read())
    put_weights(model, merge_experts(weights), published)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def as_json(comparisons: Sequence[Comparison]) -> str:
    """All figures as JSON."""
    return json.dumps([asdict(item) for item in comparisons], indent=1)


def as_table(comparisons: Sequence[Comparison]) -> str:
    """Two tables: figures of each objective, and the cosines between their gradients."""
    names = [item.name for item in comparisons]
    width = max(map(len, names))
    heads = ("loss", "|gradient|", "clipped", "accepted", "rejected", "shortest", "2nd", "3rd", "longest")
    lines = [" ".join([" " * width, *(f"{head:>10}" for head in heads)])]
    for item in comparisons:
        clipped = item.clipped
        shares = (clipped.overall, clipped.accepted, clipped.rejected, *clipped.by_length)
        cells = [f"{item.loss:10.3e}", f"{item.gradient_norm:10.3e}", *(f"{_percent(share):>10}" for share in shares)]
        lines.append(" ".join([f"{item.name:<{width}}", *cells]))
    lines += [
        "",
        "cosine between gradients",
        " ".join([" " * width, *(f"{name:>{max(6, len(name))}}" for name in names)]),
    ]
    for item in comparisons:
        cells = [f"{_cosine(item.cosines[name]):>{max(6, len(name))}}" for name in names]
        lines.append(" ".join([f"{item.name:<{width}}", *cells]))
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"


def _cosine(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
