"""A compiled policy has the scores and gradients of an eager one, and rows of new lengths are not compiled again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.services.model_types import tiny_model
from torch import Tensor

from nouscoder.config import Config, LearnerSection
from nouscoder.learner.loading import prepare_thread
from nouscoder.learner.model.admission import admit
from nouscoder.learner.model.decoder_layers import compile_layers
from nouscoder.learner.model.logprobs import Scorer
from nouscoder.learner.model.packed_attention import attend_packed, packs
from nouscoder.learner.model.synthetic import random_batch, random_policy
from nouscoder.learner.trainer import Trainer

pytestmark = pytest.mark.alone


@pytest.fixture
def _repeatable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    threads = torch.get_num_threads()
    prepare_thread(1)
    yield
    torch.compiler.reset()
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def trained(**section: Any) -> tuple[list[Tensor], list[float], list[int]]:
    """(gradients of the last step, losses, graphs compiled up to each batch)."""
    learner = LearnerSection(steps_per_batch=1, learning_rate=1e-3, microbatch_tokens=96, max_gradient_norm=1e9)
    learner = LearnerSection.model_validate({**learner.model_dump(), **section})
    trainer = Trainer(random_policy(0, num_layers=3), Config(learner=learner))
    losses, graphs = [], []
    for number in range(3):
        batch = random_batch(number, seed=1, num_groups=2, prompt_tokens=10 + 5 * number, max_tokens=20 + 9 * number)
        losses += [step.loss for step in trainer.train_batch(batch).steps]
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return [weight.grad for weight in trainer.model.parameters() if weight.grad is not None], losses, graphs


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")  # of torch itself, when Dynamo and Inductor are imported and trace
@pytest.mark.usefixtures("_repeatable")
@pytest.mark.parametrize("checkpointing", ["none", "attention", "full"])
def test_a_compiled_policy_is_the_eager_one(checkpointing: str) -> None:
    exact, losses, _ = trained(activation_checkpointing=checkpointing)
    gradients, found, graphs = trained(activation_checkpointing=checkpointing, compile=True)
    assert graphs[0] > 0, "something was compiled"
    assert graphs[1:] == graphs[:1] * 2, "rows of other lengths are not compiled again"
    assert found == pytest.approx(losses, rel=1e-5, abs=1e-7)
    for one, other in zip(gradients, exact, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-5


def test_selective_checkpointing_of_compiled_layers_is_refused() -> None:
    with pytest.raises(ValidationError, match="which compile hides: choose attention or full"):
        LearnerSection.model_validate({"compile": True, "activation_checkpointing": "selective"})


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")  # as above
@pytest.mark.usefixtures("_repeatable")
@pytest.mark.parametrize("kind", ["stablelm", "gemma2"])
def test_compiled_layers_are_admitted_too(kind: str) -> None:
    model = tiny_model(kind)
    attend_packed(model)
    compile_layers(model)
    admit(Scorer(model, compiled=True), torch.float32)
    assert packs(model) is (kind == "gemma2")
