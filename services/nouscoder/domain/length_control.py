"""Terms of a reward that depend on the length of a completion, in tokens."""

from __future__ import annotations

from collections.abc import Sequence


def soft_overlong_punishment(num_tokens: int, max_tokens: int, buffer_tokens: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), in [-1, 0], to be added to the reward.

    0 up to max_tokens - buffer_tokens, then falling linearly to -1 at max_tokens.
    """
    begin = max_tokens - buffer_tokens
    if num_tokens <= begin:
        return 0.0
    return max(-1.0, (begin - num_tokens) / buffer_tokens)


def group_length_rewards(num_tokens: Sequence[int], accepted: Sequence[bool]) -> list[float]:
    """Kimi k1.5's length reward (arXiv 2501.12599, section 2.3.3) of the rollouts of one group, in [-0.5, 0.5].

    lambda_i = 0.5 - (len_i - min len) / (max len - min len): lambda_i for an accepted rollout, min(0, lambda_i) for
    another. All are 0 when all lengths are equal.
    """
    shortest, longest = min(num_tokens), max(num_tokens)
    if shortest == longest:
        return [0.0] * len(num_tokens)
    terms = [0.5 - (count - shortest) / (longest - shortest) for count in num_tokens]
    return [term if right else min(0.0, term) for term, right in zip(terms, accepted, strict=True)]
