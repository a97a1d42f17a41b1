"""Everything the broker can refuse or fail with. Redis' errors are mapped once, in store.py."""

from __future__ import annotations

from nouscoder.errors import Unusable


class BrokerError(Exception):
    """Base of the tree; the message is one sentence for the caller."""


class BrokerUnavailable(BrokerError):
    """Redis is away, loading or cannot write just now: the same call may work later."""


class RedisFull(BrokerUnavailable):
    """Redis has no memory for another rollout: the same call may work once batches are committed."""


class InvalidRequest(BrokerError):
    """What was sent contradicts what was leased or the protocol."""


class UnknownProblem(BrokerError):
    """There is no such problem in the run."""


class Refused(BrokerError):
    """The run is not in the state the call needs: a policy out of order, a batch that is not leased."""


class Behind(Refused):
    """Redis lacks what the learner has done: the learner must send its books (RestoreRun), then repeat the call."""


class InvariantBroken(BrokerError):
    """The state in Redis breaks the broker's own law; nothing was changed."""


class RedisAddressUnusable(Unusable):
    """The Redis that the configuration names cannot be found out; the message names the file."""
