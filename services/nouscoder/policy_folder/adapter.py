"""Low-rank adapters of a policy (arXiv 2106.09685): a few small matrices that change the weights of a base policy."""

from __future__ import annotations

from torch import Tensor


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """weight + scale * b a, in float32. weight [out, in], a [rank, in], b [out, rank]."""
    return weight.float().addmm(b.float(), a.float(), alpha=scale)
