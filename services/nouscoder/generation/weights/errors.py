"""Errors about policies. After each of them, the current weights stay in use."""

from __future__ import annotations

from nouscoder.errors import ExitCode, NousCoderError, Unusable


class PolicyUnusable(NousCoderError):
    """The weights differ from the manifest, do not fit the engine, or cannot be fetched."""

    exit_code = ExitCode.DAMAGED


class PolicyGone(PolicyUnusable):
    """The learner has removed this policy, because there is or will be a newer one."""


class PolicyMissing(NousCoderError):
    """No policy has been loaded yet, so nothing can be sampled."""


class PolicyRefused(NousCoderError):
    """The manifest is older than the policy in use, or has the same version with other weights."""


class PoliciesDiffer(Unusable):
    """Learner and generation do not have the same first policy. The message names the tensor or the file."""
