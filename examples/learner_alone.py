"""The learner alone: advantages, clipped loss and loop. Start it with: .venv/bin/python examples/learner_alone.py

Broker, generation and verifier run as processes, which `running` starts. one_file_rl.py has this and the parts that are
imported here: how a batch is leased and read, how its tokens are padded, and how weights are written for generation.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from one_file_rl import FULL, SMALL, next_batch, padded, read_rollouts, running, save_weights  # type: ignore[import-not-found]
from torch import Tensor
from transformers import PreTrainedModel

from nouscoder.config import Config
from nouscoder.domain.rollout import Rollout
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.worker_id import sole_worker_id


def group_advantages(groups: Sequence[str], rewards: Tensor) -> Tensor:
    """[rollouts] -> [rollouts]: by how much a reward is better than its group's mean, in standard deviations (GRPO)."""
    advantages = torch.zeros_like(rewards)
    for group in set(groups):
        of_group = torch.tensor([name == group for name in groups])
        of_it = rewards[of_group]
        advantages[of_group] = (of_it - of_it.mean()) / (of_it.std(correction=0) + 1e-6)
    return advantages


def clipped_loss(logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, is_sampled: Tensor) -> Tensor:
    """PPO's loss: the mean over sampled tokens of -min(ratio * A, clip(ratio) * A). All are [rollouts, tokens]."""
    ratio = torch.exp(torch.where(is_sampled, logprobs - sampler_logprobs, 0.0))
    clipped = torch.clamp(ratio, 0.8, 1.28)
    return -torch.minimum(ratio * advantages, clipped * advantages)[is_sampled].mean()


def loss_of(policy: PreTrainedModel, rollouts: Sequence[Rollout], advantages: Tensor) -> Tensor:
    """The loss of the policy on these rollouts. The first token of each has no log-probability."""
    tokens, sampler_logprobs, is_sampled = padded(rollouts)
    logits = policy(input_ids=tokens[:, :-1]).logits.float()
    logprobs = torch.log_softmax(logits, dim=-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    return clipped_loss(logprobs, sampler_logprobs, advantages[:, None].expand_as(logprobs), is_sampled)


async def learn(config: Config, policy: PreTrainedModel) -> None:
    """Lease a batch, step, publish the weights, commit the batch; until every batch is trained."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    async with BrokerClient(config.broker.grpc, sole_worker_id("learner")) as broker:
        await broker.publish_policy(save_weights(policy, config.run.folder, version=0))
        for version in range(1, config.run.total_batches + 1):
            batch, lease = await next_batch(broker)
            async with broker.keep_leases() as keeper:
                keeper.add(lease)
                rollouts = await read_rollouts(broker, batch)
                rewards = torch.tensor([graded.reward for graded in batch.rollouts])
                advantages = group_advantages([rollout.group_id for rollout in rollouts], rewards)

                for part in (slice(0, None, 2), slice(1, None, 2)):
                    loss = await asyncio.to_thread(loss_of, policy, rollouts[part], advantages[part])
                    optimizer.zero_grad()
                    await asyncio.to_thread(loss.backward)
                    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                    optimizer.step()

                await broker.publish_policy(save_weights(policy, config.run.folder, version))
                await broker.commit_batch(batch.batch_id, 2 * version)
            print(f"batch {version}: reward {rewards.mean():+.3f}, loss {loss.item():+.4f}", flush=True)
        print(await broker.finish_run("every batch is trained"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--small", action="store_true", help="few problems and hardly a warm start: shows that it runs")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="learner-alone-")).resolve()
    with running(folder, given.batches, seed=0, sizes=SMALL if given.small else FULL) as (config, policy):
        asyncio.run(learn(config, policy))
