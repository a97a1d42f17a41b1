"""The services of a run as the loop sees them, for every deployment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nouscoder.config import Config
from nouscoder.retry import Retry
from nouscoder.run.supervisor import SupervisedProcess

Say = Callable[[str], None]


class RunServices:
    """The services as the loop needs them, for every deployment. `config` holds their addresses.

    `evaluation_retry` says how long an evaluation is retried after EVALUATION_ERRORS.
    """

    config: Config
    watch_every_s: float
    evaluation_retry: Retry

    @property
    def processes(self) -> Sequence[SupervisedProcess]:
        """The processes of this run that this command started, for display."""
        return ()

    @property
    def learner_ended(self) -> bool:
        """Whether the learner has stopped writing to the run folder."""
        return True

    def start(self, *names: str) -> None:
        """From now on these services must run."""

    def heard(self, answered: Mapping[str, bool]) -> None:
        """Record which services answered just now."""

    def check(self) -> None:
        """Raises NousCoderError when a started service cannot be kept alive."""
