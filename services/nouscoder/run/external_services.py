"""Services that are operated outside of the run.

INVARIANT: external services are never started, stopped or signalled. The run waits at most `run.peer_patience_s` for a
service that does not answer. The start and the end of each absence are reported once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from nouscoder.config import Config
from nouscoder.errors import ExitCode, NousCoderError, Unusable
from nouscoder.evaluation.pass_at_1 import EVALUATION_ERRORS
from nouscoder.retry import Retry
from nouscoder.run.services import RunServices, Say

EVALUATION_BEFORE = "evaluation_before.json"
_REPORT_AFTER_S = 5.0
CHOOSE_EVERY_S = 5.0


class ServiceAway(NousCoderError):
    """An external service has not answered for too long. The message names it."""

    exit_code = ExitCode.UNAVAILABLE


class ExternalServices(RunServices):
    """Watches the services. `say` reports when one stops answering and when it answers again.

    They run already, and the learner waits for the file of the first evaluation. It keeps running after the run, whose
    end the broker reports.
    """

    watch_every_s = 2.0

    def __init__(self, config: Config, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises Unusable when the learner would not wait for the evaluation of the first policy."""
        if config.learner.start_after != EVALUATION_BEFORE:
            raise Unusable(
                f'learner.start_after must be "{EVALUATION_BEFORE}" when run.services is "external":'
                " the learner must not train before the first policy is evaluated"
            )
        self.config = config
        self._patience_s = config.run.peer_patience_s
        self.evaluation_retry = Retry("evaluation", EVALUATION_ERRORS, for_s=self._patience_s, wait_s=2.0)
        self._say = say
        self._clock = clock
        self._away_since: dict[str, float] = {}
        self._reported: set[str] = set()

    def heard(self, answered: Mapping[str, bool]) -> None:
        """Record since when each service has not answered. Interruptions of a few seconds are not reported."""
        now = self._clock()
        for name, is_there in answered.items():
            since = self._away_since.setdefault(name, now)
            if not is_there:
                if now - since >= _REPORT_AFTER_S and name not in self._reported:
                    self._reported.add(name)
                    self._say(f"the {name} does not answer: waiting up to {self._patience_s:.0f} s for it")
                continue
            del self._away_since[name]
            if name in self._reported:
                self._reported.discard(name)
                self._say(f"the {name} answers again after {now - since:.0f} s")

    def check(self) -> None:
        """Raises ServiceAway."""
        for name, since in self._away_since.items():
            if self._clock() - since > self._patience_s:
                raise ServiceAway(
                    f"the {name} has not answered for {self._patience_s:.0f} s; nothing of the run is lost: run the"
                    " same command again when it is back"
                )
