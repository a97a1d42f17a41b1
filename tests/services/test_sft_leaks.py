"""sft says how many validation examples have the prompt of a training example."""

from __future__ import annotations

from tests.services.conftest import BrokerRig

from nouscoder.domain.rollout import Sampling, Task
from nouscoder.sft.reading import Examples
from nouscoder.sft.run import leak_lines


def test_validation_examples_with_a_prompt_of_training_are_counted() -> None:
    """Nothing was said, and the validation loss looked like that of new problems."""
    one = BrokerRig.rollout(Task("g-0", "g", "p", "Add.", Sampling(max_new_tokens=4)))
    assert leak_lines(Examples((one,), (), {})) == []
    (line,) = leak_lines(Examples((one,), (one,), {}))
    assert "1 of 1 validation examples have the prompt of a training example" in line
