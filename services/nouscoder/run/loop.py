"""The steps of a run: start the four services, evaluate, wait until the run is finished, evaluate again.

The services do the work. Each runs its own loop, and they communicate only with the broker, over gRPC:

      problems                                                                  policies
         |                                                                         ^
         v                       broker: all state of the run, in one Redis        |
    +---------------------------------------------------------------------------------------------+
    | QUEUED --> SAMPLING --> SAMPLED --> GRADING --> GRADED --(group complete)--> READY --> batch |
    +---------------------------------------------------------------------------------------------+
         | lease_tasks   ^           | lease_grading  ^                   | lease_batch     ^
         v               |           v                |                   v                 |
      generation --------+        verifier -----------+                learner -------------+
           submit_rollouts              submit_verdicts         publish_policy, commit_batch

    Broker.lease_tasks and the other calls                                       broker/core.py
      consumes  requests of the three workers
      produces  leases, and one atomic change of Redis for each request
      waits     for work to lease, for at most the caller's wait_s
      unblocked by a submission or a commit (broker/wakeups.py); broker/sweeper.py takes back expired leases
    RolloutWorker.run, _pull, _submit                                            generation/worker.py
      consumes  tasks (lease_tasks) and policies (watch_policy)
      produces  rollouts (submit_rollouts), sampled by the engine token by token
      waits     for a policy, for room in the engine, for a task
      unblocked by publish_policy, by a rollout that ends, by admission: unconsumed rollouts <= k * B
    GradingWorker._lease, _work                                                  verifier/worker.py
      consumes  rollouts (lease_grading) and the tests of their problems (FetchTests, or problems.tests)
      produces  verdicts (submit_verdicts)
      waits     for a free sandbox, for a rollout
      unblocked by a submission that is graded, by submit_rollouts
    LearnerWorker._next_batch, LearnerWorker._train_on                           learner/worker.py
      consumes  batches (lease_batch)
      produces  optimizer steps, checkpoints, policies (publish_policy), commits (commit_batch)
      waits     for a batch of complete groups
      unblocked by submit_verdicts; commit_batch frees room for the admission of new tasks

This module runs in the process of the command. `run_loop` starts the services or connects to them (services.py),
measures pass@1 of the first policy (evaluation.py), starts the learner, watches until the learner has finished the run
(evaluation.py measures policies meanwhile, if the configuration says so), measures pass@1 of the last policy,
and writes the summary and the report. A run without batches only evaluates its policy. plan.py runs the stages of a
plan one after the other, each by `run_loop`.

INVARIANT: evaluation_before.json exists before the learner first trains, so it is the result of the untrained policy.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from nouscoder import __version__
from nouscoder.config import Config
from nouscoder.config.generation import AgentSection
from nouscoder.config.tree import NOTHING_GIVEN, Given
from nouscoder.domain.run_status import NO_ROLLOUTS, Ledger
from nouscoder.errors import ExitCode, NousCoderError, for_terminal
from nouscoder.report.page import write_report
from nouscoder.report.untrained import FILE, Untrained, untrained
from nouscoder.run.console.feed import Feed
from nouscoder.run.deployment import deployment
from nouscoder.run.evaluation import evaluate_once, make_up, while_alive
from nouscoder.run.evaluation_files import drop_worse, log_evaluations
from nouscoder.run.folder import RunFolder
from nouscoder.run.give_back import give_back, is_given_back
from nouscoder.run.guard_watch import GuardWatch
from nouscoder.run.held_out import note_trained_on
from nouscoder.run.languages import require_languages
from nouscoder.run.learning_signal import LearningSignal, NothingToLearn, SamplerMismatch, all_retired
from nouscoder.run.local_services import KeptGeneration
from nouscoder.run.pages import open_pages
from nouscoder.run.periodic_evaluation import PeriodicEvaluation
from nouscoder.run.services import RunServices
from nouscoder.run.sinks.follower import open_sinks
from nouscoder.run.standing import lines_when_stopped
from nouscoder.run.summary import RunSummary, closing_lines, summarize
from nouscoder.run.view import View, open_view
from nouscoder.run.watch import RunWatch, broker_of

_RESUME = "the same command with --resume goes on where it stopped"
_UNTRAINED_LIMIT_S = 10.0
_TO_GO_ON = "to go on, resume with more run.total_batches"


class LedgerBroken(NousCoderError):
    """The ledger of a run does not balance: rollouts were lost or duplicated. The message shows it."""


async def train(config: Config, *, resume: bool, given: Given = NOTHING_GIVEN) -> int:
    """Run `nouscoder train`. Returns the exit code. `given` is what the configuration was made from."""
    return await interruptible(_train(config, resume=resume, given=given), lines_when_stopped(config))


async def _train(config: Config, *, resume: bool, given: Given) -> None:
    started_s = time.monotonic()
    deployed = deployment(config)
    opened = await deployed.open_folder(config, resume, given)
    folder, config = opened.folder, opened.config
    with (
        closing(folder),
        open_view(Console(), deployed.line_every_s) as terminal,
        open_pages(folder.path, config.run.pages, config.run.pages_hosts, view := Feed(terminal)) as address,
    ):
        if address:
            view.say(f"the run is shown at http://{address}/")
        for note in opened.notes:
            view.say(note)
        if folder.summary_file.exists():
            view.say(f"the run in {folder.path} is finished: nothing is left to do; {_TO_GO_ON}")
        elif not is_given_back(config):
            try:
                await run_loop(folder, config, view, started_s)
            except (NothingToLearn, SamplerMismatch) as error:
                if not config.run.release.delete:
                    raise
                view.say(str(error))  # an end as well: started again, this command would go on
        if address:
            view.say(f"the run's pages are at http://{address}/ until Ctrl-C")
        await give_back(config, view.say)
        if address:
            await until_cancelled()


async def run_loop(
    folder: RunFolder, config: Config, view: View, started_s: float, generation: KeptGeneration | None = None
) -> RunSummary:
    """The whole run, from the start of the services to the report. Raises NousCoderError with one sentence.

    `generation` is the process that the stages of a plan share.
    """
    earlier_s = (folder.read_json("elapsed.json") or {}).get("learning_seconds", 0.0)

    with open_sinks(folder, config, view.say) as sinks:
        async with deployment(config).open_services(folder, config, view.say, generation) as services:
            services.start("broker", "verifier", "generation")
            for line in agent_lines(services.config):
                view.say(line)
            await while_alive(services, require_languages(services.config))
            before = after = await evaluate_once(folder, services, view, "before")

            ledger, left = NO_ROLLOUTS, None
            if config.run.total_batches:
                await continue_if_ended(services.config, view)
                await asyncio.to_thread(note_trained_on, folder.path, config)
                services.start("learner")
                (folder.path / FILE).unlink(missing_ok=True)
                try:
                    ledger = await watch_until_ended(folder, services, view, started_s - earlier_s, sinks.look)
                    left = await note_untrained(folder, services.config)
                except (NothingToLearn, SamplerMismatch, asyncio.CancelledError):
                    await say_untrained(folder, services.config, view)
                    raise

                await make_up(folder, services, view)
                after = await evaluate_once(folder, services, view, "after")
                await asyncio.to_thread(drop_worse, folder.path)
                await asyncio.to_thread(log_evaluations, folder.path)

    summary = summarize(config, before, after, time.monotonic() - started_s + earlier_s, ledger)
    counts = {cause: len(names) for cause, names in left.by_cause.items()} if left else {}
    folder.write_json("summary.json", asdict(summary) | {"untrained": counts, "version": __version__})
    report = write_report(folder.path)
    view.settle()
    for line in [*(left.lines(folder.path) if left else ()), *closing_lines(summary, report)]:
        view.say(line)
    return summary


async def note_untrained(folder: RunFolder, config: Config) -> Untrained:
    """Write untrained.json at the end, while the broker still answers."""
    async with broker_of(config) as broker:
        _, state = await broker.read_curriculum()
        said = await broker.dead_letters(), await broker.status()
    left = await asyncio.to_thread(untrained, config, state, *said)
    folder.write_json(FILE, asdict(left))
    return left


async def say_untrained(folder: RunFolder, config: Config, view: View) -> None:
    """Write untrained.json of a run that ends early, and say what is in it, if the broker answers in time."""
    with suppress(TimeoutError, NousCoderError):
        async with asyncio.timeout(_UNTRAINED_LIMIT_S):
            left = await note_untrained(folder, config)
            view.settle()
            for line in left.lines(folder.path):
                view.say(line)


def agent_lines(config: Config) -> list[str]:
    """Where agents make the rollouts, if they do: without one the run waits."""
    if not isinstance(config.generation.environment, AgentSection):
        return []
    openai = config.generation.openai
    scheme = "https" if openai.tls.certificate else "http"
    where = f"{scheme}://{openai.http}/v1/sessions"
    return [f"agents make the rollouts: the run waits until they claim sessions at {where} (docs/environments.md)"]


async def continue_if_ended(config: Config, view: View) -> None:
    """A run that has ended at the broker goes on when it has batches left: it was extended, or it ended by a guard."""
    async with broker_of(config) as broker:
        status = await broker.status()
        if status.finished and status.batches_committed < config.run.total_batches:
            await broker.continue_run()
            view.say(f"the run goes on after {status.batches_committed} batches; it had ended: {status.finish_reason}")


async def watch_until_ended(
    folder: RunFolder, services: RunServices, view: View, started_s: float, look: Callable[[], list[str]]
) -> Ledger:
    """Show the run until the learner has finished it. Returns the last state of the ledger. `look` gives warnings.

    Raises LedgerBroken when the ledger does not balance, NothingToLearn and SamplerMismatch after it has ended the run
    for such a reason, and what `services.check` raises.
    """
    learning = LearningSignal(services.config)
    guards = GuardWatch(folder.path, services.config.run.guards)
    async with RunWatch(services.config) as watch, PeriodicEvaluation(folder, services, view) as periodic:
        while True:
            ended = services.learner_ended
            snapshot = await watch.snapshot("learning", services.processes, with_blockers=view.shows_blockers)
            view.show(snapshot)
            services.heard(watch.answered)
            services.check()
            folder.write_json("elapsed.json", {"learning_seconds": time.monotonic() - started_s})
            if watch.status is not None and not watch.status.ledger.balanced:
                raise LedgerBroken(f"the ledger does not balance: {watch.status.ledger}")
            for warning in [*await _warnings(watch, learning, guards), *look()]:
                view.say(warning)
            await periodic.step(watch.status)
            if ended and watch.status is not None and watch.status.finished:
                return watch.status.ledger
            await asyncio.sleep(services.watch_every_s)


async def _warnings(watch: RunWatch, learning: LearningSignal, guards: GuardWatch) -> list[str]:
    """What is to be said of the run. Raises NothingToLearn and SamplerMismatch after it has ended the run."""
    found: list[str | None] = []
    if watch.status is not None and (reason := all_retired(watch.status)):
        await watch.finish_run(reason)
        return [reason]
    try:
        if watch.status is not None and not watch.status.finished:
            found.append(learning.judge(watch.status))
        found += guards.look()
    except (NothingToLearn, SamplerMismatch) as error:
        await watch.finish_run(str(error))
        raise
    return [warning for warning in found if warning is not None]


async def interruptible(
    work: Coroutine[Any, Any, object], when_stopped: Callable[[], Sequence[str]] = lambda: (_RESUME,)
) -> int:
    """Await `work` and return exit code 0. Ctrl-C or SIGTERM cancels it, which stops every process, and gives 130.

    Then the lines of `when_stopped` are printed to stderr, which say how to go on.
    """
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        for line in ("nouscoder: interrupted", *when_stopped()):
            Console(stderr=True).print(Text(for_terminal(line)), soft_wrap=True)
        return ExitCode.INTERRUPTED
    return ExitCode.OK


async def until_cancelled() -> None:
    """Wait for SIGTERM."""
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
