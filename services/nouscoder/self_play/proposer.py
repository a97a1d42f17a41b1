"""The training of the proposer on the proposals of a round.

Policy-gradient steps train the policy on them, with the learner's trainer and the run's objective. The proposals
of a round are one batch. Their tokens, log-probabilities and groups are those that generation sampled; a group has one
prompt, and its advantages come from the rewards of its proposals. One process trains, on learner.device; the optimizer
begins anew in each round.

INVARIANT: the new policy depends, bit for bit, only on the old one, the proposals, their rewards and the configuration.
Its folder appears complete or not at all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from nouscoder.atomic_files import write_whole
from nouscoder.config import Config, RewardModelSection
from nouscoder.domain.batch import Batch, GradedRollout
from nouscoder.domain.rollout import Rollout
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.learner.loading import prepare_thread, trainer_at
from nouscoder.learner.model.weights import stored_dtypes
from nouscoder.learner.publication.publisher import PolicyPublisher, StagedPolicy
from nouscoder.learner.state.run_files import RunFiles
from nouscoder.policy_folder.compose import compose_policy
from nouscoder.self_play.round import JUDGED, PROPOSALS, RolloutLog

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
