"""What can be wrong with a policy. The weights in use stay in use."""

from __future__ import annotations

from nouscoder.errors import NousCoderError


class PolicyUnusable(NousCoderError):
    """The weights are not what the manifest says, do not fit the engine, or cannot be had."""


class PolicyGone(PolicyUnusable):
    """The learner does not keep this policy any more: there is, or will be, a newer one."""


class PolicyMissing(NousCoderError):
    """No policy has been loaded yet, so nothing can be sampled."""


class PolicyRefused(NousCoderError):
    """The manifest is older than the policy in use, or another one of the same version."""
