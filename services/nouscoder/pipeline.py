"""The loop, told in one file. It wires the processes of a local run and waits; all the work is done by them.

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

Here: start Redis and the four, measure pass@1 on the held-out problems under the first policy, let the learner end the
run, measure again under the last policy, write the summary and the report.

INVARIANT: evaluation_before.json exists before the learner first starts, so what it measured is the untrained policy.
"""

from __future__ import annotations

import asyncio
import hashlib
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from nouscoder.config import Config
from nouscoder.data.problems import load_problems
from nouscoder.errors import NousCoderError
from nouscoder.evaluation.pass_at_1 import Evaluation, EvaluationError, evaluate
from nouscoder.ledger import Ledger
from nouscoder.local_run import needs_own_redis, redis_spec, rewrite_addresses, service_spec
from nouscoder.policy import PolicyManifest
from nouscoder.report import write_report
from nouscoder.rollout import Sampling
from nouscoder.rpc.broker_client import BrokerClient, new_worker_id
from nouscoder.rpc.channel import PeerError
from nouscoder.rpc.run_clients import GenerationClient
from nouscoder.run_folder import RunFolder
from nouscoder.run_watch import RunWatch
from nouscoder.supervisor import Supervised, Supervisor
from nouscoder.view import View, open_view

INTERRUPTED = 130
_WATCH_EVERY_S = 0.5
_START_LIMIT_S = 120.0
_EVALUATION_TRIES = 3


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
    folder, config = RunFolder.reopen(config.run.folder) if resume else (RunFolder.create(config), config)
    try:
        with open_view(Console()) as view:
            return await interruptible(run_loop(folder, config, view, time.monotonic()))
    finally:
        folder.close()


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
    config = rewrite_addresses(folder, config)

    async with local_processes(folder, config) as supervisor:
        sampling_and_grading = [service_spec(folder, name) for name in ("broker", "verifier", "generation")]
        for spec in sampling_and_grading:
            supervisor.start(spec)
        before = await evaluate_once(folder, config, supervisor, view, "before")

        learner = supervisor.start(service_spec(folder, "learner"))
        ledger = await watch_until_ended(folder, config, supervisor, learner, view, started_s - earlier_s)

        after = await evaluate_once(folder, config, supervisor, view, "after")

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


@asynccontextmanager
async def local_processes(folder: RunFolder, config: Config) -> AsyncIterator[Supervisor]:
    """A supervisor with Redis running; on leaving nothing is left running."""
    supervisor = Supervisor()
    try:
        if needs_own_redis(folder, config):
            supervisor.start(redis_spec(folder))
        yield supervisor
    finally:
        await supervisor.close()


async def evaluate_once(folder: RunFolder, config: Config, supervisor: Supervisor, view: View, when: str) -> float:
    """pass@1 on the held-out problems, measured through the real services, once a run; a resumed run reads it again."""
    name = f"evaluation_{when}.json"
    known = folder.read_json(name)
    if known is None:
        manifest = first_policy(config) if when == "before" else await newest_policy(config)
        evaluation = await _while_alive(supervisor, _evaluate_with_patience(config, manifest, view, when))
        known = evaluation_record(evaluation, manifest.policy_version)
        folder.write_json(name, known)
    view.say(f"pass@1 on held-out problems {when}: {known['pass_at_1']:.3f}")
    return float(known["pass_at_1"])


async def _evaluate_with_patience(config: Config, manifest: PolicyManifest, view: View, when: str) -> Evaluation:
    """Measure again when a service died on the way: one that was restarted has lost its weights or its rollouts."""
    for _ in range(_EVALUATION_TRIES - 1):
        try:
            return await _evaluate(config, manifest, view, when)
        except (EvaluationError, PeerError) as error:
            view.say(f"evaluation {when} begins again: {error}")
    return await _evaluate(config, manifest, view, when)


async def _evaluate(config: Config, manifest: PolicyManifest, view: View, when: str) -> Evaluation:
    problems = load_problems(config.in_run_folder(config.problems.held_out))
    client = GenerationClient(config.generation.grpc)
    try:
        if (await client.status(_START_LIMIT_S)).policy_version != manifest.policy_version:
            await client.update_policy(manifest)
    finally:
        await client.close()
    sampling = config.generation.sampling
    return await evaluate(
        problems,
        config.generation.grpc,
        config.verifier.grpc,
        samples=config.problems.held_out_samples,
        sampling=Sampling(sampling.temperature, sampling.top_p, sampling.max_new_tokens, config.run.seed),
        progress=lambda done, total: view.progress(f"evaluation {when}", done, total),
    )


async def watch_until_ended(
    folder: RunFolder, config: Config, supervisor: Supervisor, learner: Supervised, view: View, started_s: float
) -> Ledger:
    """Show the run until the learner has ended it; answers the last state of the ledger.

    Raises PipelineError when the ledger of an instant does not balance: then rollouts were lost or doubled.
    """
    async with RunWatch(config) as watch:
        while True:
            ended = learner.ended.is_set()
            supervisor.check()
            view.show(await watch.snapshot("learning", supervisor.processes))
            folder.write_json("elapsed.json", {"learning_seconds": time.monotonic() - started_s})
            if watch.status is not None and not watch.status.ledger.balanced:
                raise PipelineError(f"the ledger does not balance: {watch.status.ledger}")
            if ended and watch.status is not None and watch.status.finished:
                return watch.status.ledger
            await asyncio.sleep(_WATCH_EVERY_S)


async def _while_alive(supervisor: Supervisor, work: Any) -> Any:
    """Await `work`, but stop at once when a process cannot be kept alive."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            supervisor.check()
            await asyncio.wait({task}, timeout=_WATCH_EVERY_S)
        return task.result()
    finally:
        task.cancel()


def first_policy(config: Config) -> PolicyManifest:
    """Version 0: the weights the run begins with."""
    path = config.in_run_folder(config.policy.path) / "model.safetensors"
    data = path.read_bytes()
    return PolicyManifest(0, str(path), hashlib.sha256(data).hexdigest(), len(data), 0)


async def newest_policy(config: Config) -> PolicyManifest:
    """The last policy the learner published."""
    async with BrokerClient(config.broker.grpc, new_worker_id("watch")) as broker:
        async for manifest in broker.watch_policy():
            return manifest
    raise PipelineError("the broker knows no policy")


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
