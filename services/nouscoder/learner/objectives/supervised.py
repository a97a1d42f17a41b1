"""Supervised fine-tuning: the mean negative log-likelihood of the examples' own tokens.

With N loss tokens in the minibatch, L = -1/N sum_t log pi_theta(o_t). Tokens given to the policy are no loss tokens.
"""

from __future__ import annotations

from nouscoder.learner.objectives.base import LossInputs, MinibatchCounts, Needs, ObjectiveTerms


class Supervised:
    """See the module. Advantages, rewards and recorded log-probabilities do not matter."""

    needs = Needs()

    def __call__(self, inputs: LossInputs, counts: MinibatchCounts) -> ObjectiveTerms:
        """The share of this micro-batch in the minibatch's mean."""
        return ObjectiveTerms(-inputs.logprobs.sum() / counts.num_tokens)
