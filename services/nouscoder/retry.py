"""Retry policies: every retry has a name and a bound in time or in tries, and is logged.

A `Retry` is a constant next to the work that it repeats, or is made from a setting. tenacity does the waiting; waits
double from `wait_s` to `max_wait_s`, with jitter.

INVARIANT: `call` returns what the work returned, or raises the error of the last try; it never tries again after an
error that `on` does not name, nor after `for_s` seconds or `max_tries` tries.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
    stop_any,
    wait_random_exponential,
)

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Errors = tuple[type[BaseException], ...]


@dataclass(frozen=True, slots=True)
class Retry:
    """A policy. `name` says in the log what is tried; `on` names the errors after which it is tried again.

    `is_passing` narrows `on` by the error's value. Failures shorter than `log_after_s` are not logged. Longer ones
    are logged once that time has passed, then every `log_every_s`, and when they end.
    """

    name: str
    on: Errors
    for_s: float = math.inf
    max_tries: int | None = None
    wait_s: float = 0.1
    max_wait_s: float = 2.0
    log_after_s: float = 5.0
    log_every_s: float = 60.0
    is_passing: Callable[[BaseException], bool] = lambda error: True

    def __post_init__(self) -> None:
        """Raises ValueError for a policy without a bound."""
        if math.isinf(self.for_s) and self.max_tries is None:
            raise ValueError(f"the retry of {self.name} has no bound: give for_s or max_tries")

    async def call(
        self, work: Callable[[], Awaitable[Answer]], on_retry: Callable[[BaseException], None] = lambda error: None
    ) -> Answer:
        """The result of `work`. `on_retry` gets the error before each further try. Raises what the last try raised."""
        trouble = _Trouble(self, on_retry)
        stops = [stop_after_delay(self.for_s)] if math.isfinite(self.for_s) else []
        bounds = [*stops, *([stop_after_attempt(self.max_tries)] if self.max_tries is not None else [])]
        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, self.on) and self.is_passing(error)),
            stop=stop_any(*bounds),
            wait=wait_random_exponential(multiplier=self.wait_s, max=self.max_wait_s, min=self.wait_s / 2),
            before_sleep=trouble.begins,
            sleep=asyncio.sleep,
            reraise=True,
        )

        async def once() -> Answer:  # tenacity awaits only what is declared async, not a lambda's coroutine
            return await work()

        answer: Answer = await retrying(once)
        trouble.ends()
        return answer


class _Trouble:
    """Logs a failure that lasts: after `log_after_s`, every `log_every_s`, and when it is over."""

    def __init__(self, policy: Retry, on_retry: Callable[[BaseException], None]) -> None:
        self._policy = policy
        self._on_retry = on_retry
        self._lasted_s = 0.0
        self._logged_s: float | None = None

    def begins(self, state: RetryCallState) -> None:
        """Called after each try that failed."""
        self._lasted_s = state.seconds_since_start or 0.0
        error = state.outcome.exception() if state.outcome is not None else None
        if error is None:
            return
        self._on_retry(error)
        logged_s = self._logged_s
        due_s = self._policy.log_after_s if logged_s is None else logged_s + self._policy.log_every_s
        if self._lasted_s < due_s:
            return
        self._logged_s = self._lasted_s
        for_s = self._policy.for_s if math.isfinite(self._policy.for_s) else None
        log.warning(
            "trying again",
            extra={
                "what": self._policy.name,
                "for_s": for_s,
                "left_s": None if for_s is None else max(0, round(for_s - self._lasted_s)),
                "max_tries": self._policy.max_tries,
                "reason": str(error),
            },
        )

    def ends(self) -> None:
        """Called when a try succeeded."""
        if self._logged_s is not None:
            log.info("succeeded again", extra={"what": self._policy.name, "after_s": round(self._lasted_s, 1)})
