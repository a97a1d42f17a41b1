"""Runs the proposals of a round with real services: generation samples the policy, the verifier runs every program.

The services are those of a run without batches, in a run folder of its own. Its broker admits nothing.

Then policy-gradient steps train the policy on them, with the learner's trainer and the run's objective. The proposals
of a round are one batch. Their tokens, log-probabilities and groups are those that generation sampled; a group has one
prompt, and its advantages come from the rewards of its proposals. One process trains, on learner.device; the optimizer
begins anew in each round.

INVARIANT: the new policy depends, bit for bit, only on the old one, the proposals, their rewards and the configuration.
Its folder appears complete or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nouscoder.atomic_files import write_whole
from nouscoder.config import Config, RewardModelSection
from nouscoder.domain.batch import Batch, GradedRollout
from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.rollout import Rollout, Task
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.errors import Unusable
from nouscoder.evaluation.pass_at_1 import Pinning, sample_tasks, verdict_on
from nouscoder.generation.environments.base import EnvironmentUnusable, TaskRefused
from nouscoder.generation.environments.prompts import Prompts
from nouscoder.learner.loading import prepare_thread, trainer_at
from nouscoder.learner.model.weights import stored_dtypes
from nouscoder.learner.publication.publisher import PolicyPublisher, StagedPolicy
from nouscoder.learner.state.run_files import RunFiles
from nouscoder.policy_folder.compose import compose_policy
from nouscoder.policy_folder.tokenizer import TokenizerError, load_tokenizer
from nouscoder.rpc.generation_client import GenerationClient
from nouscoder.rpc.tls import channel_credentials
from nouscoder.rpc.verifier_client import VerifierClient, verifier_token
from nouscoder.run.evaluation import first_policy, while_alive
from nouscoder.run.folder import RunFolder
from nouscoder.run.services import RunServices, deployment
from nouscoder.run.smoke import admit_nothing
from nouscoder.run.view import View
from nouscoder.self_play.round import JUDGED, PROPOSALS, Known, RolloutLog, Round, RoundWork


async def propose(folder: RunFolder, config: Config, number: int, known: Known, view: View) -> None:
    """Make judged.jsonl and accepted.jsonl in the folder. Raises NousCoderError with one sentence."""
    fits = room_for_answers(config)
    async with deployment(config).open_services(folder, config, view.say, None) as services:
        services.start("broker", "verifier", "generation")
        await admit_nothing(services.config)
        manifest, credentials = first_policy(services.config), channel_credentials(services.config.tls)
        address, token = services.config.verifier.grpc, verifier_token(services.config)
        round_ = Round(services.config, number, folder.path, known, manifest.digest)
        async with VerifierClient(address, credentials=credentials, token=token) as grader:
            work = RoundWork(_Sampler(services, manifest, view), partial(verdict_on, grader), fits, view.progress)
            await while_alive(services, round_.run(work))


def room_for_answers(config: Config) -> Callable[[Task], bool]:
    """Whether prompt and answer of a task fit in generation.max_tokens_total, and the vocabulary has the prompt."""
    folder = config.in_run_folder(config.policy.path)
    try:
        environment = config.generation.environment
        prompts = Prompts(load_tokenizer(folder, environment.date), environment)
    except (TokenizerError, EnvironmentUnusable) as error:
        raise Unusable(f"policy.path: {error}") from error

    def fits(task: Task) -> bool:
        try:
            num_tokens = len(prompts.prompt_of(task))
        except TaskRefused:
            return False
        return num_tokens + task.sampling.max_new_tokens <= config.generation.max_tokens_total

    return fits


class _Sampler:
    """Samples tasks from one policy. What was sampled before an interruption of the service is not sampled again."""

    def __init__(self, services: RunServices, manifest: PolicyManifest, view: View) -> None:
        self._services = services
        self._manifest = manifest
        self._view = view

    async def __call__(self, tasks: Sequence[Task], took: Callable[[Rollout], object]) -> None:
        config, left = self._services.config, {task.rollout_id: task for task in tasks}

        def keep(rollout: Rollout) -> None:
            took(rollout)
            del left[rollout.rollout_id]

        async def once() -> None:
            client = GenerationClient(config.generation.grpc, credentials=channel_credentials(config.tls))
            async with client as source:
                pinning = Pinning(self._manifest, config.evaluation.limit_s)
                await sample_tasks(source, pinning, [*left.values()], keep)

        await self._services.evaluation_retry.call(once, lambda error: self._view.say(f"sampling goes on: {error}"))


# Training on the proposals.

METRICS = "proposer.jsonl"


def graded_proposals(folder: Path) -> Batch:
    """The judged proposals in the folder of a round, as a batch of the policy that sampled them."""
    lines = [json.loads(line) for line in (folder / JUDGED).read_text(encoding="utf8").splitlines()]
    rewards = {line["rollout_id"]: line["reward"] for line in lines}
    with RolloutLog(folder / PROPOSALS, "") as log:
        proposals = log.all()
    return Batch(0, tuple(_graded(rollout, rewards[rollout.rollout_id]) for rollout in proposals), 0)


def _graded(rollout: Rollout, reward: float) -> GradedRollout:
    """A proposal counts as accepted when its reward is above 0. Advantages are made of the reward alone."""
    kind = VerdictKind.ACCEPTED if reward > 0 else VerdictKind.WRONG_ANSWER
    verdict = Verdict(kind, passed=int(reward > 0), total=1, graded=1, duration_s=0.0, backend="self-play")
    return GradedRollout(rollout, verdict, reward)


def train_proposer(config: Config, batch: Batch, to: Path) -> list[dict[str, Any]]:
    """Train the policy of `config` on the batch and write it to the folder `to`. Returns a record for each step.

    They are also in proposer.jsonl of the run folder. Raises TrainingError, Unusable and StorageError.
    """
    # Without what belongs to a run of batches.
    changes = {
        "steps_per_batch": config.self_play.proposer_steps,
        "samples_per_batch": 0,
        "replay_batches": 0,
        "reward_model": RewardModelSection(),
    }
    config = config.model_copy(update={"learner": config.learner.model_copy(update=changes)})
    files = RunFiles.of(config)
    prepare_thread(config.learner.threads)
    torch.manual_seed(config.run.seed)
    trainer = trainer_at(config, None)
    trained = trainer.train_batch(batch)
    records = [
        {
            "step": step.step,
            "loss": step.loss,
            "gradient_norm": step.gradient_norm,
            "learning_rate": step.learning_rate,
            "skipped": step.skipped,
            "tokens": step.num_tokens,
            "reward": trained.statistics.reward_mean,
        }
        for step in trained.steps
    ]
    write_whole(files.run / METRICS, "".join(json.dumps(record) + "\n" for record in records).encode())
    staged = StagedPolicy.of(trainer.model, 1, trainer.step, stored_dtypes(files.policy), files.policy)
    publisher = PolicyPublisher(files.policies, 1, shard_bytes=config.learner.policy_shard_bytes)
    compose_policy(to, files.policy, Path(publisher.write(staged).folder), link=True)
    return records
