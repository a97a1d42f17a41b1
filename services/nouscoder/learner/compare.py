"""Compares all published objectives on one recorded batch: losses, gradients and clipped tokens.

All objectives see the same log-probabilities, advantages and correction. The gradients are those of one minibatch that
holds the whole batch; on the CPU they take one float32 vector of the model's size for each objective.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nouscoder.config import Config, LearnerSection, load_config
from nouscoder.domain.batch import Batch
from nouscoder.errors import Unusable
from nouscoder.learner.model.admission import admit
from nouscoder.learner.model.logprobs import Scorer, score_tokens
from nouscoder.learner.model.packed_attention import row_budget
from nouscoder.learner.model.packing import pack
from nouscoder.learner.model.weights import empty_model, load_model, put_weights
from nouscoder.learner.publication.publisher import version_folder
from nouscoder.learner.scoring import score
from nouscoder.learner.state.saved_batches import SavedBatches
from nouscoder.learner.trainer import counts_of, loss_inputs
from nouscoder.objectives.base import LossInputs, Objective, ObjectiveTerms
from nouscoder.objectives.clip import clipped_tokens
from nouscoder.objectives.loss import SharedTerms, SurrogateLoss
from nouscoder.objectives.registry import PUBLISHED
from nouscoder.policy_folder.policy_tensors import PolicyTensors, merge_experts
from nouscoder.policy_folder.weights_files import policy_files


@dataclass(frozen=True, slots=True)
class Clipped:
    """Share of loss tokens on which the clip acts. None where there are no such tokens.

    `by_length` has one share for each quarter of the batch's rollouts, the shortest first.
    """

    overall: float
    accepted: float | None
    rejected: float | None
    by_length: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One objective on the batch. `cosines` are those of its gradient with the gradient of each objective, by name.

    A cosine is None when one of the gradients is zero.
    """

    name: str
    loss: float
    gradient_norm: float
    clipped: Clipped
    cosines: Mapping[str, float | None]


class _Tally:
    """Sums over micro-batches for one objective."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.loss = 0.0
        self.gradient = torch.zeros(())
        self.is_clipped: list[Tensor] = []

    def add(self, inputs: LossInputs, terms: ObjectiveTerms, gradients: Sequence[Tensor]) -> None:
        self.loss += float(terms.loss.detach())
        self.gradient = self.gradient + torch.cat([gradient.flatten().float().cpu() for gradient in gradients])
        self.is_clipped.append(clipped_tokens(inputs, terms.diagnostics).cpu())


def compare(
    policy: PreTrainedModel, old_policy: PreTrainedModel, batch: Batch, settings: LearnerSection
) -> list[Comparison]:
    """Every objective of PUBLISHED on the batch, with pi_theta = `policy` and pi_old = `old_policy`.

    `settings` give the correction, the advantages and the size of micro-batches; KL and entropy terms are left out.
    Raises ValueError for a batch that cannot be trained on, or whose rollouts are all masked.
    """
    scored = [item for group in score(batch, settings.advantage) for item in group if not item.masked]
    if not scored:
        raise ValueError(f"all rollouts of batch {batch.batch_id} are masked")
    budget = min(row_budget(model, settings.microbatch_tokens) for model in (policy, old_policy))
    parts = pack([item.graded.rollout for item in scored], budget, policy.device)
    shared = SharedTerms(correction=settings.correction)
    tallies = {name: _Tally(SurrogateLoss(section, shared)) for name, section in PUBLISHED.items()}
    counts = counts_of(scored)
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    for part in parts:
        with torch.no_grad():
            old_logprobs = score_tokens(old_policy, part).logprobs
        rollouts = [scored[index] for index in part.rollout_indices]
        inputs = loss_inputs(part, rollouts, score_tokens(policy, part), old_logprobs)
        for tally in tallies.values():
            terms = tally.objective(inputs, counts)
            gradients = torch.autograd.grad(
                terms.loss, parameters, retain_graph=True, materialize_grads=True, allow_unused=True
            )
            tally.add(inputs, terms, gradients)
    order = sorted(range(len(scored)), key=lambda index: scored[index].graded.rollout.num_sampled_tokens)
    quarter_of = {index: 4 * place // len(order) for place, index in enumerate(order)}
    owners = [part.rollout_indices[row] for part in parts for row in part.rollout_of_token.tolist()]
    accepted = torch.tensor([scored[index].accepted for index in owners])
    quarters = torch.tensor([quarter_of[index] for index in owners])  # of the rollouts, by length
    return [_comparison(name, tallies, accepted, quarters) for name in tallies]


def _comparison(name: str, tallies: Mapping[str, _Tally], accepted: Tensor, quarters: Tensor) -> Comparison:
    """`accepted` and `quarters` [tokens] are those of the rollout of each loss token."""
    tally = tallies[name]
    is_clipped = torch.cat(tally.is_clipped)
    clipped = Clipped(
        overall=float(is_clipped.float().mean()),
        accepted=_share(is_clipped, accepted),
        rejected=_share(is_clipped, ~accepted),
        by_length=tuple(_share(is_clipped, quarters == quarter) for quarter in range(4)),
    )
    gradient = tally.gradient.double()
    cosines = {other: _cosine(gradient, tallies[other].gradient.double()) for other in tallies}
    return Comparison(name, tally.loss, float(gradient.norm()), clipped, cosines)


def _share(is_clipped: Tensor, chosen: Tensor) -> float | None:
    return float(is_clipped[chosen].float().mean()) if bool(chosen.any()) else None


def _cosine(one: Tensor, other: Tensor) -> float | None:
    size = float(one.norm() * other.norm())
    return max(-1.0, min(1.0, float(one @ other) / size)) if size and math.isfinite(size) else None


# `nouscoder objectives compare`: the policies of a recorded batch in its run folder, and the output.


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
    policy_now, policy_before = (_admitted(_policy(config, run, version)) for version in (new, old))
    return compare(policy_now, policy_before, batch, config.learner)


def _admitted(model: PreTrainedModel) -> PreTrainedModel:
    admit(Scorer(model).eval(), model.dtype)
    return model


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
        cells = [
            f"{item.loss:10.3e}",
            f"{item.gradient_norm:10.3e}",
            *(f"{_cell(share, '.2%'):>10}" for share in shares),
        ]
        lines.append(" ".join([f"{item.name:<{width}}", *cells]))
    lines += [
        "",
        "cosine between gradients",
        " ".join([" " * width, *(f"{name:>{max(6, len(name))}}" for name in names)]),
    ]
    for item in comparisons:
        cells = [f"{_cell(item.cosines[name], '.3f'):>{max(6, len(name))}}" for name in names]
        lines.append(" ".join([f"{item.name:<{width}}", *cells]))
    return "\n".join(lines)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
