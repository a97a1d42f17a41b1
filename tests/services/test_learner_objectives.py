"""A new objective, with its own settings, needs and diagnostics, works with the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from prometheus_client import CollectorRegistry
from transformers import PreTrainedModel

from nouscoder.config import Config, LearnerSection
from nouscoder.learner.loading import prepare_thread
from nouscoder.learner.metrics.prometheus import LearnerMetrics
from nouscoder.learner.model.logprobs import score_tokens
from nouscoder.learner.model.packing import pack
from nouscoder.learner.model.synthetic import random_batch, random_policy
from nouscoder.learner.scoring import ScoredRollout, score
from nouscoder.learner.state.run_log import BatchSeconds, metrics_lines
from nouscoder.learner.trainer import Trainer
from nouscoder.objectives.advantage import AdvantageSection
from nouscoder.objectives.base import Diagnostic, LossInputs, MinibatchCounts, Needs, ObjectiveTerms, Reduction

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    threads = torch.get_num_threads()
    prepare_thread(1)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class EntropyAndReference:
    """L = -1/N sum over tokens of (A log pi + bonus * H - penalty * (log pi - log pi_ref)^2)."""

    bonus: float
    penalty: float
    needs: Needs = Needs(reference_logprobs=True, entropy_gradient=True)

    def __call__(self, inputs: LossInputs, counts: MinibatchCounts) -> ObjectiveTerms:
        assert inputs.reference_logprobs is not None
        distance = (inputs.logprobs - inputs.reference_logprobs) ** 2
        gains = inputs.advantages * inputs.logprobs + self.bonus * inputs.entropies - self.penalty * distance
        return ObjectiveTerms(
            loss=-gains.sum() / counts.num_tokens,
            diagnostics={
                "reference_distance": Diagnostic(distance.detach()),
                "reference_distance_max": Diagnostic(distance.detach(), Reduction.MAX),
                "advantage_min": Diagnostic(inputs.advantages, Reduction.MIN),
            },
        )


def config(microbatch_tokens: int = 16384) -> Config:
    section = LearnerSection(steps_per_batch=1, max_gradient_norm=1e9, microbatch_tokens=microbatch_tokens)
    return Config(learner=section)


def scored_rollouts() -> list[ScoredRollout]:
    groups = score(random_batch(0, seed=1), AdvantageSection())
    return [scored for group in groups for scored in group]


def plain_loss(model: PreTrainedModel, reference: PreTrainedModel, bonus: float, penalty: float) -> torch.Tensor:
    """The loss of the whole batch, rollout by rollout, from the logits of a plain forward pass."""
    total, num_tokens = torch.zeros(()), 0
    for scored in scored_rollouts():
        rollout = scored.graded.rollout
        ids = torch.tensor([rollout.token_ids.tolist()])
        first, count = len(rollout.prompt_token_ids) - 1, rollout.num_sampled_tokens
        chosen = torch.tensor(rollout.sampled_token_ids.tolist())
        logprobs = model(input_ids=ids).logits[0, first:-1].log_softmax(-1)
        with torch.no_grad():
            of_reference = reference(input_ids=ids).logits[0, first:-1].log_softmax(-1)[range(count), chosen]
        taken = logprobs[range(count), chosen]
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        gains = scored.advantage * taken + bonus * entropies - penalty * (taken - of_reference) ** 2
        total, num_tokens = total - gains.sum(), num_tokens + count
    return total / num_tokens


@pytest.mark.parametrize("microbatch_tokens", [100_000, 80])
def test_entropies_with_gradient_and_reference_log_probabilities_reach_the_objective(microbatch_tokens: int) -> None:
    """The loss and its gradient equal those of the formula for every division of the batch."""
    bonus, penalty = 30.0, 7.0
    model, reference = random_policy(0), random_policy(1)
    expected = plain_loss(model, reference, bonus, penalty)
    torch.autograd.backward(expected)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = float(torch.stack([gradient.norm() for gradient in gradients]).norm())

    trainer = Trainer(
        random_policy(0), config(microbatch_tokens), lambda _: reference, EntropyAndReference(bonus, penalty)
    )
    (step,) = trainer.train_batch(random_batch(0, seed=1)).steps
    assert step.loss == pytest.approx(float(expected.detach()), rel=1e-4)
    assert step.gradient_norm == pytest.approx(norm, rel=1e-3)
    without = Trainer(
        random_policy(0), config(microbatch_tokens), lambda _: reference, EntropyAndReference(0.0, penalty)
    )
    assert without.train_batch(random_batch(0, seed=1)).steps[0].gradient_norm != pytest.approx(norm, rel=1e-3)


def test_entropies_have_a_gradient_only_if_needed() -> None:
    part = pack([scored.graded.rollout for scored in scored_rollouts()], 100_000, CPU)[0]
    assert not score_tokens(random_policy(0), part).entropies.requires_grad
    assert score_tokens(random_policy(0), part, entropy_gradient=True).entropies.requires_grad


def test_diagnostics_are_in_log_and_metrics_by_their_names() -> None:
    trainer = Trainer(random_policy(0), config(80), lambda _: random_policy(1), EntropyAndReference(0.1, 0.1))
    trained = trainer.train_batch(random_batch(0, seed=1))
    (line,) = metrics_lines(trained, 1, BatchSeconds())
    lowest = min(scored.advantage for scored in scored_rollouts())
    assert line["advantage_min"] == pytest.approx(lowest)
    assert 0 < line["reference_distance"] < line["reference_distance_max"]
    assert "clip_fraction_low" not in line
    assert "entropy" in line

    registry = CollectorRegistry()
    LearnerMetrics(registry).trained(trained, flops=3.0, peak_flops=2.0)
    assert registry.get_sample_value("nouscoder_learner_mfu") == pytest.approx(3.0 / trained.duration_s / 2.0)
    assert trained.squared_tokens == sum((len(one.graded.rollout.token_ids) - 1) ** 2 for one in trained.scored)
    for name in ("advantage_min", "reference_distance", "reference_distance_max", "entropy"):
        assert registry.get_sample_value("nouscoder_learner_diagnostic", {"name": name}) == line[name]


def test_an_objective_that_needs_a_reference_is_refused_without_one() -> None:
    with pytest.raises(ValueError, match="needs a reference policy"):
        Trainer(random_policy(0), config(), objective=EntropyAndReference(0.1, 0.1))


def test_an_objective_must_not_use_the_name_of_a_common_diagnostic() -> None:
    @dataclass(frozen=True)
    class Clashing:
        needs: Needs = Needs()

        def __call__(self, inputs: LossInputs, counts: MinibatchCounts) -> ObjectiveTerms:
            return ObjectiveTerms(inputs.logprobs.sum(), {"entropy": Diagnostic(inputs.entropies)})

    with pytest.raises(ValueError, match="must not name a diagnostic 'entropy'"):
        Trainer(random_policy(0), config(), objective=Clashing()).train_batch(random_batch(0, seed=1))
