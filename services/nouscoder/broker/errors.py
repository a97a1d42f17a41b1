"""The errors of the broker. Only store.py maps errors of Redis to them."""

from __future__ import annotations

from nouscoder.errors import Unusable


class BrokerError(Exception):
    """Base of the tree; the message is one sentence for the caller."""


class BrokerUnavailable(BrokerError):
    """Redis does not answer, is loading, or cannot write now: the same call may succeed later."""


class RedisFull(BrokerUnavailable):
    """Redis has no memory for another rollout: the same call may succeed when batches are committed."""


class InvalidRequest(BrokerError):
    """The request contradicts the protocol, or the lease that it names."""


class UnknownProblem(BrokerError):
    """The run has no such problem, or no tests with such a digest."""


class Refused(BrokerError):
    """The state of the run does not allow the call: a policy out of order, a batch that is not leased."""


class Behind(Refused):
    """Redis lacks something that the learner did: it must send its state (RestoreRun), then repeat the call."""


class InvariantBroken(BrokerError):
    """The state in Redis violates an invariant of the broker; nothing was changed."""


class RedisAddressUnusable(Unusable):
    """The configured address of Redis cannot be read or used; the message says why."""
