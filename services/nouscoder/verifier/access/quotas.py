"""What each client may use: submissions in flight and per minute (a token bucket).

INVARIANT: a client never has more submissions in flight than its API key allows. Over any period of t minutes it is
admitted at most submissions_per_minute * (1 + t) times. A refused request does not use up either quota. Submissions of
jobs leave a part of both quotas to the client's requests.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from nouscoder.domain.submission import Submission
from nouscoder.domain.verdict import Verdict
from nouscoder.verifier.access.caller import Caller, current_caller
from nouscoder.verifier.grading.grader import GraderDecorator, Grading, OnOutcome, QueueFull

log = logging.getLogger(__name__)

_REQUESTS_SHARE = 0.2  # of a quota, which submissions of jobs do not use


class QuotaExceeded(QueueFull):
    """The client has used up the quota of its API key. Other clients are still served."""


@dataclass(slots=True)
class Account:
    """What a client has in flight, and what is left of its minute."""

    in_flight: int = 0
    left: float = 0.0
    refilled_s: float | None = None

    def refill(self, per_minute: int, now_s: float) -> None:
        """Add what has come since the last time."""
        gained = per_minute if self.refilled_s is None else (now_s - self.refilled_s) * per_minute / 60
        self.left, self.refilled_s = min(float(per_minute), self.left + gained), now_s


class QuotaLedger(Protocol):
    """Where accounts are kept: in this process, or shared with others (processes/shared_ledger.py)."""

    def account(self, client: str) -> AbstractContextManager[Account]:
        """The account of a client, which nobody else reads or changes inside the context. Raises QuotaExceeded."""


class LocalLedger:
    """The accounts of one process."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}  # bounded by the number of client names with a key

    @contextmanager
    def account(self, client: str) -> Iterator[Account]:
        """See `QuotaLedger`."""
        yield self._accounts.setdefault(client, Account())


class Quotas:
    """Keeps one account for each client. All keys of one client share it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, ledger: QuotaLedger | None = None) -> None:
        self._clock = clock
        self._ledger = ledger or LocalLedger()

    @contextmanager
    def admitted(self, caller: Caller) -> Iterator[None]:
        """Admit one submission of `caller` for the duration of the context. Raises QuotaExceeded."""
        with self._ledger.account(caller.client) as account:
            most, per_minute = caller.quota.max_in_flight, caller.quota.submissions_per_minute
            share = _REQUESTS_SHARE if caller.in_background else 0.0
            if most is not None and account.in_flight >= most - min(most - 1, math.ceil(share * most)):
                raise QuotaExceeded(
                    1, f"{caller.client} has {most} submissions in flight, the most that its key allows"
                )
            if per_minute is not None:
                account.refill(per_minute, self._clock())
                least = 1 + share * (per_minute - 1)
                if account.left < least:
                    wait_s = max(1, math.ceil((least - account.left) * 60 / per_minute))
                    raise QuotaExceeded(
                        wait_s, f"{caller.client} may submit {per_minute} a minute, retry in {wait_s} s"
                    )
                account.left -= 1
            account.in_flight += 1
        try:
            yield
        finally:
            with self._ledger.account(caller.client) as account:
                account.in_flight -= 1


class QuotaGrader(GraderDecorator):
    """Grades with `inner` for callers within their quota."""

    def __init__(self, inner: Grading, quotas: Quotas) -> None:
        super().__init__(inner)
        self._quotas = quotas

    async def grade(self, submission: Submission, on_outcome: OnOutcome | None = None) -> Verdict:
        """See `Grader.grade`. Also raises QuotaExceeded."""
        with self._quotas.admitted(current_caller()):
            return await self._inner.grade(submission, on_outcome)
