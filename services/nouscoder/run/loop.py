"""The loop, told in one file. It wires the services of a run and waits; all the work is done by them.

      +------------------------- broker (Redis streams) --------------------------+
      | lease_tasks -> submit_rollouts -> lease_grading -> submit_verdicts ->     |
      | (group complete: filter) -> lease_batch -> publish_policy -> commit_batch |
      +---------------------------------------------------------------------------+

    process      loop (file)                      consumes            produces            unblocked by
    generation   RolloutWorker (generation/worker) tasks, policies     rollouts            a lease, a newer policy
    verifier     GradingWorker (verifier/worker)   rollouts, tests     verdicts            a lease, a free sandbox
    learner      LearnerWorker (learner/worker)    batches             checkpoints,        a batch of complete groups
                                                                       policies, commits
    broker       BrokerService (broker/service)    all of the above    leases, the ledger  admission: <= k * B

Here: start Redis and the four (or connect to external ones, see services.py), measure pass@1 on the held-out problems
under the first policy, let the learner end the run, measure again under the last policy, write summary and report.

INVARIANT: evaluation_before.json exists before the learner first trains, so what it measured is the untrained policy.
"""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console

from nouscoder.config import Config
from nouscoder.data.problems import load_problems
from nouscoder.domain.ledger import Ledger
from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.rollout import Sampling
from nouscoder.errors import NousCoderError
from nouscoder.evaluation.pass_at_1 import Evaluation, EvaluationError, evaluate
from nouscoder.policy_folder.weights_files import WeightsMissing, shards_of
from nouscoder.report import write_report
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.channel import PeerError
from nouscoder.rpc.generation_client import GenerationClient
from nouscoder.rpc.tls import channel_credentials
from nouscoder.rpc.verifier_client import VerifierClient
from nouscoder.rpc.worker_identity import observer_id
from nouscoder.run.folder import RunFolder
from nouscoder.run.pages import open_pages
from nouscoder.run.services import RunServices, deployment
from nouscoder.run.view import View, open_view
from nouscoder.run.watch import RunWatch

INTERRUPTED = 130


class PipelineError(NousCoderError):
    """The run did not end as it should; the message says why."""


@dataclass(frozen=True, slots=True)
class Summary:
    """summary.json: the run in figures. `learning_seconds` counts from the start of the command, resumed time added."""

    name: str
    seed: int
    steps: int
    pass_at_1_before: float
    pass_at_1_after: float
    learning_seconds: float
    ledger: dict[str, Any]
    balanced: bool


async def train(config: Config, *, resume: bool) -> int:
    """`nouscoder train`: the exit code."""
    return await interruptible(_train(config, resume=resume))


async def _train(config: Config, *, resume: bool) -> None:
    started_s = time.monotonic()
    deployed = deployment(config)
    folder, config = await deployed.open_folder(config, resume)
    try:
        with (
            open_view(Console(), deployed.line_every_s) as view,
            open_pages(folder.path, config.run.pages) as address,
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


async def _until_cancelled() -> None:
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()


async def interruptible(work: Any) -> int:
    """Await `work`; Ctrl-C or SIGTERM cancels it, which stops every process, and answers 130."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return INTERRUPTED
    return 0


async def run_loop(folder: RunFolder, config: Config, view: View, started_s: float) -> Summary:
    """The whole run, from processes to report. Raises NousCoderError in one sentence."""
    earlier_s = (folder.read_json("elapsed.json") or {}).get("learning_seconds", 0.0)

    async with deployment(config).open_services(folder, config, view.say) as services:
        services.start("broker", "verifier", "generation")
        before = await evaluate_once(folder, services, view, "before")

        services.start("learner")
        ledger = await watch_until_ended(folder, services, view, started_s - earlier_s)

        after = await evaluate_once(folder, services, view, "after")

    summary = Summary(
        name=config.run.name,
        seed=config.run.seed,
        steps=config.total_steps,
        pass_at_1_before=before,
        pass_at_1_after=after,
        learning_seconds=round(time.monotonic() - started_s + earlier_s, 1),
        ledger=asdict(ledger),
        balanced=ledger.balanced,
    )
    folder.write_json("summary.json", asdict(summary))
    report = write_report(folder.path)
    for sentence in closing_words(summary, report):
        view.say(sentence)
    return summary


async def evaluate_once(folder: RunFolder, services: RunServices, view: View, when: str) -> float:
    """pass@1 on the held-out problems, measured through the real services, once a run; a resumed run reads it again."""
    name = f"evaluation_{when}.json"
    known = folder.read_json(name)
    if known is None:
        manifest = first_policy(services.config) if when == "before" else await newest_policy(services)
        evaluation = await _while_alive(services, _evaluate_with_patience(services, manifest, view, when))
        known = evaluation_record(evaluation, manifest.policy_version)
        folder.write_json(name, known)
    view.say(f"pass@1 on held-out problems {when}: {known['pass_at_1']:.3f}")
    return float(known["pass_at_1"])


async def _evaluate_with_patience(services: RunServices, manifest: PolicyManifest, view: View, when: str) -> Evaluation:
    """Measure again when a service died on the way: one that was restarted has lost its weights or its rollouts."""
    started_s = time.monotonic()
    for num_tries in count(1):
        try:
            return await _evaluate(services.config, manifest, view, when)
        except (EvaluationError, PeerError) as error:
            if services.gives_up(num_tries, time.monotonic() - started_s):
                raise
            view.say(f"evaluation {when} begins again: {error}")
        await asyncio.sleep(services.watch_every_s)
    raise AssertionError("unreachable")


async def _evaluate(config: Config, manifest: PolicyManifest, view: View, when: str) -> Evaluation:
    credentials = channel_credentials(config.tls)
    sampling = config.generation.sampling
    return await evaluate(
        load_problems(config.in_run_folder(config.problems.held_out)),
        GenerationClient(config.generation.grpc, credentials=credentials),
        VerifierClient(config.verifier.grpc, credentials=credentials, token=verifier_token(config)),
        samples=config.problems.held_out_samples,
        sampling=Sampling(sampling.temperature, sampling.top_p, sampling.max_new_tokens, config.run.seed),
        manifest=manifest,
        progress=lambda done, total: view.progress(f"evaluation {when}", done, total),
    )


async def watch_until_ended(folder: RunFolder, services: RunServices, view: View, started_s: float) -> Ledger:
    """Show the run until the learner has ended it; answers the last state of the ledger.

    Raises PipelineError when the ledger of an instant does not balance: then rollouts were lost or doubled.
    """
    async with RunWatch(services.config) as watch:
        while True:
            ended = services.learner_ended
            view.show(await watch.snapshot("learning", services.processes))
            services.heard(watch.answered)
            services.check()
            folder.write_json("elapsed.json", {"learning_seconds": time.monotonic() - started_s})
            if watch.status is not None and not watch.status.ledger.balanced:
                raise PipelineError(f"the ledger does not balance: {watch.status.ledger}")
            if ended and watch.status is not None and watch.status.finished:
                return watch.status.ledger
            await asyncio.sleep(services.watch_every_s)


async def _while_alive(services: RunServices, work: Any) -> Any:
    """Await `work`, but stop at once when a process cannot be kept alive."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            services.check()
            await asyncio.wait({task}, timeout=services.watch_every_s)
        return task.result()
    finally:
        task.cancel()


def first_policy(config: Config) -> PolicyManifest:
    """Version 0: the weights the run begins with."""
    folder = config.in_run_folder(config.policy.path)
    try:
        return PolicyManifest(0, 0, str(folder), shards_of(folder), config.generation.policy_from)
    except WeightsMissing as error:
        raise PipelineError(f"the policy to begin with cannot be read: {error}") from error


async def newest_policy(services: RunServices) -> PolicyManifest:
    """The last policy the learner published. Raises PipelineError when the broker tells of none in time."""
    config = services.config
    client = BrokerClient(config.broker.grpc, observer_id("watch"), credentials=channel_credentials(config.tls))
    with suppress(TimeoutError):
        async with client as broker, asyncio.timeout(config.run.peer_patience_s):
            async for manifest in broker.watch_policy():
                return manifest
    raise PipelineError(f"the broker announced no policy within {config.run.peer_patience_s:.0f} s")


def verifier_token(config: Config) -> str:
    """What evaluations show to the verifier; empty when it asks for nothing."""
    if not config.run.verifier_token_file:
        return ""
    try:
        return Path(config.run.verifier_token_file).read_text(encoding="utf8").strip()
    except OSError as error:
        raise PipelineError(f"run.verifier_token_file cannot be read: {error.strerror}") from error


def evaluation_record(evaluation: Evaluation, policy_version: int) -> dict[str, Any]:
    """evaluation_*.json."""
    return {
        "pass_at_1": evaluation.pass_at_1,
        "policy_version": policy_version,
        "num_problems": evaluation.num_problems,
        "num_rollouts": evaluation.num_rollouts,
        "by_family": evaluation.by_family,
        "samples": [asdict(sample) for sample in evaluation.samples],
    }


def closing_words(summary: Summary, report: Path) -> list[str]:
    """What stays on the screen."""
    return [
        f"pass@1 on held-out problems: {summary.pass_at_1_before:.3f} before, {summary.pass_at_1_after:.3f} after"
        f" {summary.steps} steps ({summary.pass_at_1_after - summary.pass_at_1_before:+.3f})",
        f"ledger {'balanced' if summary.balanced else 'NOT BALANCED'}; {summary.learning_seconds:.0f} s in all",
        f"report: {report}",
    ]
