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
      unblocked by a submission or a commit (broker/wakeups.py); broker/serving.py takes back expired leases
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
    BatchSource.next, LearnerWorker._train_on                                    learner/worker.py
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
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from rich.console import Console

from nouscoder.config import Config
from nouscoder.domain.run_status import NO_ROLLOUTS, Ledger
from nouscoder.errors import NousCoderError
from nouscoder.report import write_report
from nouscoder.run.evaluation import PeriodicEvaluation, drop_worse, evaluate_once
from nouscoder.run.folder import RunFolder, RunSummary, closing_lines, summarize
from nouscoder.run.guards import GuardWatch, LearningSignal, NothingToLearn
from nouscoder.run.pages import open_pages
from nouscoder.run.services import KeptGeneration, RunServices, deployment
from nouscoder.run.sinks.processes import open_sinks
from nouscoder.run.view import View, open_view
from nouscoder.run.watch import RunWatch

EXIT_INTERRUPTED = 130


class LedgerBroken(NousCoderError):
    """The ledger of a run does not balance: rollouts were lost or duplicated. The message shows it."""


async def train(config: Config, *, resume: bool) -> int:
    """Run `nouscoder train`. Returns the exit code."""
    return await interruptible(_train(config, resume=resume))


async def _train(config: Config, *, resume: bool) -> None:
    started_s = time.monotonic()
    deployed = deployment(config)
    folder, config = await deployed.open_folder(config, resume)
    try:
        with (
            open_view(Console(), deployed.line_every_s) as view,
            open_pages(folder.path, config.run.pages, config.run.pages_hosts) as address,
        ):
            if folder.summary_file.exists():
                view.say(f"the run in {folder.path} is finished: nothing is left to do")
            else:
                await run_loop(folder, config, view, started_s)
            if address:
                view.say(f"the run's pages are at {address}, until SIGTERM")
                await _until_cancelled()
    finally:
        folder.close()


async def run_loop(
    folder: RunFolder, config: Config, view: View, started_s: float, generation: KeptGeneration | None = None
) -> RunSummary:
    """The whole run, from the start of the services to the report. Raises NousCoderError with one sentence.

    `generation` is the process that the stages of a plan share.
    """
    earlier_s = (folder.read_json("elapsed.json") or {}).get("learning_seconds", 0.0)
    for line in await deployment(config).notes(config):
        view.say(line)

    with open_sinks(folder, config, view.say) as sinks:
        async with deployment(config).open_services(folder, config, view.say, generation) as services:
            services.start("broker", "verifier", "generation")
            before = after = await evaluate_once(folder, services, view, "before")

            ledger = NO_ROLLOUTS
            if config.run.total_batches:
                services.start("learner")
                ledger = await watch_until_ended(folder, services, view, started_s - earlier_s, sinks.look)

                after = await evaluate_once(folder, services, view, "after")
                await asyncio.to_thread(drop_worse, folder.path)

    summary = summarize(config, before, after, time.monotonic() - started_s + earlier_s, ledger)
    folder.write_json("summary.json", summary.record())
    report = write_report(folder.path)
    for line in closing_lines(summary, report):
        view.say(line)
    return summary


async def watch_until_ended(
    folder: RunFolder, services: RunServices, view: View, started_s: float, look: Callable[[], list[str]]
) -> Ledger:
    """Show the run until the learner has finished it. Returns the last state of the ledger. `look` gives warnings.

    Raises LedgerBroken when the ledger does not balance, NothingToLearn after it has ended a run whose groups are all
    filtered, and what `services.check` raises.
    """
    learning = LearningSignal(services.config)
    guards = GuardWatch(folder.path, services.config.run.guards)
    async with RunWatch(services.config) as watch, PeriodicEvaluation(folder, services, view) as periodic:
        while True:
            ended = services.learner_ended
            view.show(await watch.snapshot("learning", services.processes))
            services.heard(watch.answered)
            services.check()
            folder.write_json("elapsed.json", {"learning_seconds": time.monotonic() - started_s})
            if watch.status is not None and not watch.status.ledger.balanced:
                raise LedgerBroken(f"the ledger does not balance: {watch.status.ledger}")
            await _warn(watch, learning, view)
            for warning in [*guards.look(), *look()]:
                view.say(warning)
            await periodic.step(watch.status)
            if ended and watch.status is not None and watch.status.finished:
                return watch.status.ledger
            await asyncio.sleep(services.watch_every_s)


async def _warn(watch: RunWatch, learning: LearningSignal, view: View) -> None:
    """Say that all groups are filtered. Raises NothingToLearn after it has ended the run."""
    if watch.status is None or watch.status.finished:
        return
    try:
        warning = learning.judge(watch.status)
    except NothingToLearn as error:
        await watch.finish_run(str(error))
        raise
    if warning is not None:
        view.say(warning)


async def interruptible(work: Coroutine[Any, Any, object]) -> int:
    """Await `work` and return exit code 0. Ctrl-C or SIGTERM cancels it, which stops every process, and gives 130."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return EXIT_INTERRUPTED
    return 0


async def _until_cancelled() -> None:
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
