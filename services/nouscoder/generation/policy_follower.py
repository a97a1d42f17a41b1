"""Loads each newer policy that the broker announces, and decides what a failure means.

INVARIANT: a policy that cannot be loaded leaves the previous one in use. The loop ends only with an error: without any
policy, after three policies in a row that could not be loaded, or when no policy follows one that the learner removed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from nouscoder.domain.policy import PolicyManifest
from nouscoder.generation.errors import PolicyGone, PolicyUnusable
from nouscoder.generation.policies import Policies
from nouscoder.retry import Retry

log = logging.getLogger(__name__)

# A policy that the learner has removed is skipped without a retry, because a newer one follows.
_LOADING = Retry(
    "loading a policy",
    (PolicyUnusable,),
    max_tries=4,
    wait_s=0.5,
    log_after_s=0.0,
    is_passing=lambda error: not isinstance(error, PolicyGone),
)
_MAX_BAD_POLICIES = 3
_NEWER_LIMIT_S = 900.0


async def follow_policies(manifests: AsyncIterator[PolicyManifest], policies: Policies) -> None:
    """Load the policies of `manifests` until cancelled. Each load is tried up to 4 times.

    Raises PolicyUnusable when the first policy or three in a row cannot be loaded, and PolicyGone when no newer policy
    comes within 900 s after one that the learner has removed.
    """
    bad_in_a_row = 0
    limit_s: float | None = None
    while True:
        try:
            async with asyncio.timeout(limit_s):
                manifest = await anext(manifests)
        except TimeoutError:
            raise PolicyGone(f"no newer policy came within {limit_s:.0f} s after a removed one") from None
        try:
            await _load(manifest, policies)
            bad_in_a_row, limit_s = 0, None
        except PolicyGone as error:
            log.warning("policy skipped, a newer one follows", extra={"reason": str(error)})
            limit_s = _NEWER_LIMIT_S
        except PolicyUnusable as error:
            bad_in_a_row += 1
            if policies.current is None or bad_in_a_row == _MAX_BAD_POLICIES:
                raise
            log.error("policy not loaded, the previous one stays in use", extra={"reason": str(error)})


async def _load(manifest: PolicyManifest, policies: Policies) -> None:
    await _LOADING.call(lambda: policies.follow(manifest))
