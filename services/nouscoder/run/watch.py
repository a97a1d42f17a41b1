"""Reads the state of a run from its services at intervals, notices that it learns nothing, and applies the guards.

The guards (domain/guards.py) judge the batches in metrics.jsonl.

INVARIANT of `LearningSignal`: while rollouts are filtered and no group is kept, a warning is due within WARN_AFTER_S of
the first filtered group, and after `run.max_filtered_batches` batches of filtered rollouts `judge` raises
NothingToLearn.

INVARIANT: a policy that solved problems and, after it was trained, solves none is told so, and is not told to take
other problems.

INVARIANT: a run of whose problems generation can make no rollout ends, with the reason: `judge` raises NothingToLearn.

INVARIANT: a batch with a mismatch above run.guards.mismatch_stop that is trained while a GuardWatch looks makes `look`
raise SamplerMismatch. Batches that were there before do not, so a run can be resumed with what mends it.

INVARIANT: a guard's warning is returned once. It is returned again only after a batch for which the guard is silent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from nouscoder.config import Config, GuardsSection
from nouscoder.domain.guards import BatchFigures, Guard, Thresholds, mismatch_sentence, warnings
from nouscoder.domain.run_status import RolloutState, RunStatus
from nouscoder.errors import Unusable
from nouscoder.retry import Retry
from nouscoder.rpc.broker_client import PATIENCE_S, BrokerClient
from nouscoder.rpc.channel import PeerError, PeerUnreachable
from nouscoder.rpc.generation_client import GenerationClient, GenerationStatus
from nouscoder.rpc.learner_client import LearnerClient, LearnerStatus
from nouscoder.rpc.metrics_page import read_metrics
from nouscoder.rpc.tls import channel_credentials
from nouscoder.rpc.worker_id import observer_id
from nouscoder.run.sinks.follower import MetricsTail
from nouscoder.run.supervisor import SupervisedProcess
from nouscoder.run.view import ProcessLine, Snapshot

Answer = TypeVar("Answer")

_STARTING = Retry("the start of generation", (PeerUnreachable,), for_s=1800.0, wait_s=0.5, log_after_s=30.0)


def broker_of(config: Config, patience_s: float = PATIENCE_S) -> BrokerClient:
    """A client of the run's broker for what only watches: it is refused while the broker serves another run."""
    credentials = channel_credentials(config.tls)
    return BrokerClient(config.broker.grpc, observer_id("watch"), patience_s, credentials, config.asked_run)


_WINDOW_S = 10.0


async def generation_started(config: Config, show: Callable[[str, int, int], None]) -> None:
    """Wait until generation answers, and show for how long. Raises PeerError."""
    begun_s = time.monotonic()
    async with GenerationClient(config.generation.grpc, 0.0, channel_credentials(config.tls)) as client:
        phase = "generation is starting ({:.0f} s)"
        await _STARTING.call(client.status, lambda _: show(phase.format(time.monotonic() - begun_s), 0, 0))


class Rate:
    """The growth of a counter per second, averaged over about _WINDOW_S. A falling counter restarted at 0."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        self._total = 0.0
        self._last = 0.0

    def update(self, value: float, now_s: float) -> float:
        """The rate after a new reading."""
        self._total += value - self._last if value >= self._last else value
        self._last = value
        self._samples.append((now_s, self._total))
        while len(self._samples) > 2 and now_s - self._samples[1][0] > _WINDOW_S:
            self._samples.pop(0)
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


class RunWatch:
    """Reads broker, generation, learner and verifier. The figures of a service that does not answer are missing."""

    def __init__(self, config: Config) -> None:
        self._config = config
        credentials = channel_credentials(config.tls)
        self._generation = GenerationClient(config.generation.grpc, 0.0, credentials, config.asked_run)
        self._learner_client = LearnerClient(config.learner.grpc, credentials, config.asked_run)
        self._connections = AsyncExitStack()
        self._broker = broker_of(config, 0.0)
        self._tokens = Rate()
        self._tests = Rate()
        self._started_s = time.monotonic()
        self._pass_rates: dict[int, float] = {}
        self._first: tuple[int, float] | None = None
        self._learner: LearnerStatus | None = None
        self.status: RunStatus | None = None
        # Which services answered the last request.
        self.answered: dict[str, bool] = {}

    async def __aenter__(self) -> RunWatch:
        """Connect."""
        for client in (self._broker, self._generation, self._learner_client):
            await self._connections.enter_async_context(client)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnect."""
        await self._connections.aclose()

    async def snapshot(
        self, phase: str, processes: Iterable[SupervisedProcess], *, with_blockers: bool = False
    ) -> Snapshot:
        """The current state of the run, with what blocks it if it is asked for."""
        status, learner, generation, num_tests, blockers = await asyncio.gather(
            _or_none(self._broker.status()),
            _or_none(self._learner_client.status()),
            _or_none(self._generation.status()),
            asyncio.to_thread(read_counter, self._config.verifier.metrics, "nouscoder_verifier_tests"),
            _or_none(self._broker.why_stalled()) if with_blockers else _nobody_asked(),
        )
        self.status = status or self.status
        self.answered = {
            name: answer is not None
            for name, answer in (("broker", status), ("learner", learner), ("generation", generation))
        }
        # A service that does not answer is restarting or has finished the run: its last answer is kept.
        self._learner = learner or self._learner
        found = self._assemble(phase, tuple(processes), status, self._learner, generation, num_tests)
        return found if blockers is None else replace(found, blockers=tuple(one.reason for one in blockers))

    async def finish_run(self, reason: str) -> None:
        """End the run at the broker, so that no service works for it any more. Raises PeerError."""
        await self._broker.finish_run(reason)

    def _assemble(
        self,
        phase: str,
        processes: tuple[SupervisedProcess, ...],
        status: RunStatus | None,
        learner: LearnerStatus | None,
        generation: GenerationStatus | None,
        num_tests: float | None,
    ) -> Snapshot:
        now_s = time.monotonic()
        batch = status.batches_committed if status else 0
        if learner and batch:
            self._pass_rates.setdefault(batch, learner.pass_rate)
        return Snapshot(
            phase=phase,
            batch=batch,
            total_batches=self._config.run.total_batches,
            step=learner.step if learner else (status.step if status else 0),
            total_steps=self._config.total_steps,
            pass_rate=learner.pass_rate if learner and learner.step else None,
            reward_mean=learner.reward_mean if learner and learner.step else None,
            staleness_mean=learner.staleness_mean if learner and learner.step else None,
            staleness_max=int(learner.staleness_max) if learner and learner.step else None,
            tests_per_second=None if num_tests is None else self._tests.update(num_tests, now_s),
            tokens_per_second=self._tokens.update(generation.num_tokens, now_s) if generation else None,
            policy_version=status.policy_version if status else None,
            ledger=status.ledger if status else None,
            time_left_s=self._time_left_s(batch, now_s),
            elapsed_s=now_s - self._started_s,
            processes=tuple(ProcessLine(p.spec.name, p.state.value, p.pid, p.num_restarts) for p in processes),
            learner_state=learner.state if learner else "",
            pass_rates=tuple(self._pass_rates.values()),
        )

    def _time_left_s(self, batch: int, now_s: float) -> float | None:
        """The time for the remaining batches at the rate since this watch began."""
        self._first = self._first or (batch, now_s)
        done = batch - self._first[0]
        if done < 1:
            return None
        return (self._config.run.total_batches - batch) * (now_s - self._first[1]) / done


async def _or_none(question: Awaitable[Answer]) -> Answer | None:
    """The answer, or None when the service does not answer, because it may be restarting."""
    try:
        return await question
    except PeerError:
        return None


async def _nobody_asked() -> None:
    return None


def read_counter(metrics_address: str, family: str) -> float | None:
    """The sum of a counter's samples on a Prometheus page; None when the page cannot be read."""
    try:
        text = read_metrics(metrics_address, 1.0)
    except (OSError, ValueError):
        return None
    for found in text_string_to_metric_families(text):
        if found.name == family:
            return sum(sample.value for sample in found.samples if sample.name == f"{family}_total")
    return 0.0


# What is to be warned of.

WARN_AFTER_S = 30.0
_ADVICE = "take other problems or another policy, or set broker.drop_zero_variance = false"
_DIVERGED_ADVICE = (
    "other problems will not help: begin again from an earlier version (nouscoder export RUN --version N) with a lower"
    " learner.learning_rate"
)
_EXPECTED = 7.0  # accepted rollouts, at the rate of before. The chance of none instead is exp(-7), one in a thousand.


class NothingToLearn(Unusable):
    """All groups of a long time were filtered, or generation refuses all problems. The message says which."""


class SamplerMismatch(Unusable):
    """Sampler and learner compute different log-probabilities. The message says how much, and what may cause it."""


@dataclass(frozen=True, slots=True)
class _Since:
    """The counts when a group was last kept. `filtered_s` is when the first group was filtered after that."""

    kept: int
    filtered: int
    graded: int
    accepted: int
    filtered_s: float | None = None


def all_retired(status: RunStatus) -> str:
    """That the run is over because all problems are retired for good, which is no failure; "" if it is not so."""
    if status.finished or not status.all_retired:
        return ""
    return (
        f"the run ends after {status.batches_committed} batches: no problem is left to ask, because all are retired"
        " (broker.curriculum.retire_after) for good (recheck_epochs = 0)"
    )


class LearningSignal:
    """Watches the counts of one run."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._batch_size = config.broker.batch_size
        self._max_filtered = config.run.max_filtered_batches * config.broker.batch_size
        self._clock = clock
        self._since: _Since | None = None
        self._warn_at = self._batch_size
        self._refused = 0

    def judge(self, status: RunStatus) -> str | None:
        """A warning if one is due: after WARN_AFTER_S or a batch, then at each doubled count. Raises NothingToLearn."""
        if status.all_refused:
            raise NothingToLearn(
                f"the run ended: generation can make no rollout of any of the {status.num_problems} problems, such as:"
                f" {status.refused_reason}"
            )
        if status.refused_problems > 2 * self._refused:
            self._refused = status.refused_problems
            return (
                f"warning: refused: generation can make no rollout of {status.refused_problems} of"
                f" {status.num_problems} problems, which are not asked again, such as: {status.refused_reason}"
            )
        in_flight = status.ledger.in_flight
        kept = status.ledger.trained + in_flight.get(RolloutState.READY, 0) + in_flight.get(RolloutState.TRAINING, 0)
        now = _Since(kept, status.ledger.filtered, status.rollouts_graded, status.rollouts_accepted)
        since = self._since
        if since is None or now.kept != since.kept:
            self._since, self._warn_at = now, 0
            return None
        filtered = now.filtered - since.filtered
        if not filtered:
            return None
        begun_s = self._clock() if since.filtered_s is None else since.filtered_s
        self._since = _Since(since.kept, since.filtered, since.graded, since.accepted, begun_s)
        sentence = _sentence(since, now, filtered)
        if self._max_filtered and filtered >= self._max_filtered:
            raise NothingToLearn(f"the run ended: {sentence} (run.max_filtered_batches is the bound)")
        due = filtered >= self._batch_size or self._clock() - begun_s >= WARN_AFTER_S
        if not due or filtered < self._warn_at:
            return None
        self._warn_at = 2 * filtered
        return f"warning: all_filtered: {sentence}"


def _sentence(since: _Since, now: _Since, filtered: int) -> str:
    accepted, graded = now.accepted - since.accepted, now.graded - since.graded
    rate = since.accepted / since.graded if since.graded else 0.0
    if not accepted and since.kept and rate * graded >= _EXPECTED:
        return (
            f"0 of {graded} accepted, and {rate:.0%} before: the training has broken the policy (its weights have"
            f" diverged), so all {filtered} rollouts were filtered; {_DIVERGED_ADVICE}"
        )
    if not accepted:
        why = "the policy solves none of these problems"
    elif accepted == graded:
        why = "the policy always solves these problems"
    else:
        why = "each problem is solved always or never"
    return f"{accepted} of {graded} accepted: {why}, so all {filtered} rollouts were filtered; {_ADVICE}"


# The guards' warnings.


class GuardWatch:
    """Reads the new lines of one run's metrics.jsonl at each look."""

    def __init__(self, run: Path, settings: GuardsSection) -> None:
        self._tail = MetricsTail(run / "metrics.jsonl")
        self._thresholds = settings.record(Thresholds)
        self._batches: dict[int, BatchFigures] = {}
        self._said: set[Guard] = set()
        self._read()

    def look(self) -> list[str]:
        """The warnings that are new, each with the name of its guard. Raises SamplerMismatch."""
        new = self._read()
        limit = self._thresholds.mismatch_stop
        worst = max((figures.mismatch or 0.0 for figures in new), default=0.0)
        if limit and worst > limit:
            raise SamplerMismatch(
                f"the run ended: {mismatch_sentence(worst, limit)}. Mend it and resume, or set run.guards.mismatch_stop"
            )
        found = self._warnings()
        said = [f"warning: {guard}: {sentence}" for guard, sentence in found.items() if guard not in self._said]
        self._said = set(found)
        return said

    @property
    def standing(self) -> list[str]:
        """All warnings of the batches up to now."""
        self._read()
        return [f"warning: {guard}: {sentence}" for guard, sentence in self._warnings().items()]

    def _read(self) -> list[BatchFigures]:
        """The figures of the batches that have new lines."""
        records = [record for record in self._tail.new_records() if "batch_id" in record]
        for record in records:
            known = self._batches.get(record["batch_id"])
            self._batches[record["batch_id"]] = _figures(record, known)
        return [self._batches[number] for number in dict.fromkeys(record["batch_id"] for record in records)]

    def _warnings(self) -> dict[Guard, str]:
        return warnings([*self._batches.values()], self._thresholds)


def _figures(line: dict[str, Any], earlier: BatchFigures | None) -> BatchFigures:
    """Those of a step's line. A step may have no fresh rollout: then the figure is that of an `earlier` step."""
    return BatchFigures(
        entropy=line.get("entropy"),
        length=line.get("response_length"),
        repetition_share=line.get("repetition_share"),
        hard_coding_share=line.get("hard_coding_share"),
        same_programs=line.get("same_programs"),
        model_reward_correlation=line.get("model_reward_correlation"),
        mismatch=line.get("mismatch_fresh_abs_mean", None if earlier is None else earlier.mismatch),
    )
