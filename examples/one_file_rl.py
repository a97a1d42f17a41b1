"""A whole reinforcement learning run on one page. Start it with: .venv/bin/python examples/one_file_rl.py

A small policy learns to write programs. Three services run as processes, exactly as in a large run, and this file takes
the place of the fourth, the learner:

    broker      all state of the run, in a Redis that it starts; gives out tasks, rollouts and batches
    generation  samples groups of programs from the newest policy, token by token
    verifier    runs each program on hidden tests, in a sandbox
    this file   batch -> advantages -> steps of the policy -> new weights, which generation loads while it samples

    weights 0 --> | tasks -> generation -> rollouts -> verifier -> verdicts -> broker -> batch |--> this file
                  +------------------- weights 1, 2, 3, ... (publish_policy) <------------------+

The three services work while the policy is trained, so some tokens of a batch are from weights that are a few versions
old. The broker bounds that age (`max_staleness`), and PPO's clipped ratio corrects for it: the log-probability that the
sampler has recorded for each token is the denominator.

The learner of the product adds what a long run needs: checkpoints and exact resume, saved batches, packing, sharding,
other objectives and optimizers, metrics. `nouscoder demo` is the same run with it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from nouscoder.config import Config, load_config
from nouscoder.data.problem_parquet import load_problems
from nouscoder.domain.batch import RecordedBatch
from nouscoder.domain.lease import Lease
from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.problem import Problem
from nouscoder.domain.rollout import Rollout, Sampling, Task
from nouscoder.domain.verdict import VerdictKind
from nouscoder.policy_folder.pretrained import load_pretrained
from nouscoder.policy_folder.weights_files import shards_of
from nouscoder.private_folder import socket_folder
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.generation_client import GenerationClient, Pin
from nouscoder.rpc.verifier_client import VerifierClient
from nouscoder.rpc.worker_id import sole_worker_id
from nouscoder.store.record_store import ByteRange
from nouscoder.store.rollout_record import decode_rollout

SETTINGS = """
[run]
name = "one-file"
root = "{root}"
total_batches = {batches}
seed = {seed}

[demo]                      # the problems and the first policy, which is trained on noisy demonstrations
train_problems = {train}
held_out_problems = {held_out}
warm_start_share = {warm_start}

[broker]
grpc = "{broker}"
drop_zero_variance = {drop}  # groups of equal rewards teach nothing
group_size = {group_size}   # programs for each problem, whose rewards are compared
batch_size = {batch_size}   # programs in a batch
pipeline_k = 3              # at most so many batches of rollouts are in flight
max_staleness = 4           # no token of a batch is from weights that are more versions old
lease_s = 5.0
batch_lease_s = 10.0

[verifier]
grpc = "{verifier}"

[generation]
grpc = "{generation}"
max_running = 64
max_tokens_total = 160

[generation.sampling]
max_new_tokens = 72
"""
FULL: dict[str, object] = {
    "train": 2000,
    "held_out": 200,
    "warm_start": 1.0,
    "group_size": 8,
    "batch_size": 64,
    "drop": "true",
}
SMALL: dict[str, object] = {
    "train": 40,
    "held_out": 4,
    "warm_start": 0.02,
    "group_size": 4,
    "batch_size": 8,
    "drop": "false",
}
NOUSCODER = (sys.executable, "-m", "nouscoder")
STEPS_PER_BATCH = 2
LEARNING_RATE = 3e-4
CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # a token's ratio is clipped to 1 - 0.2 and 1 + 0.28 (DAPO)
PATIENCE_S = 300.0


async def run(config: Config, policy: Qwen3ForCausalLM) -> tuple[float, float]:
    """The loop. Returns pass@1 on the held-out problems before and after."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    held_out = load_problems(config.in_run_folder(config.problems.held_out))

    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(BrokerClient(config.broker.grpc, sole_worker_id("learner")))
        generation = await stack.enter_async_context(GenerationClient(config.generation.grpc))
        verifier = await stack.enter_async_context(VerifierClient(config.verifier.grpc))

        manifest = save_weights(policy, config.run.folder, version=0)
        await broker.publish_policy(manifest)
        before = await pass_at_1(held_out, manifest, generation, verifier, config)
        print(f"pass@1 on {len(held_out)} held-out problems: {before:.3f}", flush=True)

        for version in range(1, config.run.total_batches + 1):
            batch, lease = await next_batch(broker)
            async with broker.keep_leases() as keeper:
                keeper.add(lease)
                rollouts = await read_rollouts(broker, batch)
                rewards = [graded.reward for graded in batch.rollouts]
                advantages = group_advantages([rollout.group_id for rollout in rollouts], rewards)
                loss = await asyncio.to_thread(train, policy, optimizer, rollouts, advantages)

                manifest = save_weights(policy, config.run.folder, version)
                await broker.publish_policy(manifest)
                await broker.commit_batch(batch.batch_id, version * STEPS_PER_BATCH)
            age = version - 1 - min(graded.header.oldest_version for graded in batch.rollouts)
            accepted = sum(graded.verdict.kind is VerdictKind.ACCEPTED for graded in batch.rollouts)
            share = accepted / len(rollouts)
            print(f"batch {version}: accepted {share:.2f}, loss {loss:+.4f}, oldest weights {age} versions", flush=True)

        ledger = await broker.finish_run("every batch is trained")
        after = await pass_at_1(held_out, manifest, generation, verifier, config)
        print(f"rollouts: {ledger}, balanced: {ledger.balanced}", flush=True)
    return before, after


async def next_batch(broker: BrokerClient) -> tuple[RecordedBatch, Lease]:
    """The next batch of graded rollouts, in whole groups. It is ours while the lease is renewed."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        leased = await broker.lease_batch()
        if leased.batch is not None and leased.lease is not None:
            return leased.batch, leased.lease
    raise SystemExit(f"no batch came within {PATIENCE_S:.0f} s: {await broker.why_stalled()}")


async def read_rollouts(broker: BrokerClient, batch: RecordedBatch) -> list[Rollout]:
    """The rollouts of a batch: tokens, log-probabilities and versions. The batch itself has only their headers."""
    ranges = [ByteRange(graded.record, 0, graded.header.record_bytes) for graded in batch.rollouts]
    records = [bytearray() for _ in ranges]
    async for place, data in broker.stream_records(ranges):
        records[place] += data
    return [decode_rollout(bytes(record)) for record in records]


def group_advantages(groups: Sequence[str], rewards: Sequence[float]) -> list[float]:
    """(reward - mean of its group) / standard deviation of its group (GRPO, arXiv 2402.03300), [rollouts]."""
    of_group: dict[str, list[float]] = {}
    for group, reward in zip(groups, rewards, strict=True):
        of_group.setdefault(group, []).append(reward)
    scale = {group: torch.tensor(values).std(correction=0).item() for group, values in of_group.items()}
    mean = {group: sum(values) / len(values) for group, values in of_group.items()}
    return [(reward - mean[group]) / (scale[group] + 1e-6) for group, reward in zip(groups, rewards, strict=True)]


def train(
    policy: PreTrainedModel, optimizer: torch.optim.Optimizer, rollouts: Sequence[Rollout], advantages: Sequence[float]
) -> float:
    """Take the steps of one batch, each on a part of it. Returns the mean loss."""
    losses = []
    for part in range(STEPS_PER_BATCH):
        loss = clipped_loss(policy, rollouts[part::STEPS_PER_BATCH], advantages[part::STEPS_PER_BATCH])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def clipped_loss(policy: PreTrainedModel, rollouts: Sequence[Rollout], advantages: Sequence[float]) -> Tensor:
    """PPO's loss, the mean over all sampled tokens: -min(ratio * A, clip(ratio) * A)."""
    tokens, sampler_logprobs, is_sampled = padded(rollouts)
    # Attention is causal and the padding comes last, so no token that counts sees it.
    logits = policy(input_ids=tokens[:, :-1]).logits.float()
    logprobs = torch.log_softmax(logits, dim=-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    ratio = torch.exp(torch.where(is_sampled, logprobs - sampler_logprobs, 0.0))
    gain = torch.tensor(advantages)[:, None]
    clipped = torch.clamp(ratio, 1 - CLIP_LOW, 1 + CLIP_HIGH)
    return -torch.minimum(ratio * gain, clipped * gain)[is_sampled].mean()


def padded(rollouts: Sequence[Rollout]) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids [rollouts, length], and for each but the first: the sampler's log-probability, whether it counts.

    Tokens that were given, as the prompt, do not count.
    """
    length = max(len(rollout.token_ids) for rollout in rollouts)
    tokens = torch.zeros(len(rollouts), length, dtype=torch.int64)
    logprobs = torch.zeros(len(rollouts), length - 1)
    is_sampled = torch.zeros(len(rollouts), length - 1, dtype=torch.bool)
    for row, rollout in enumerate(rollouts):
        tokens[row, : len(rollout.token_ids)] = torch.tensor(rollout.token_ids.tolist())
        for start, end in rollout.sampled_ranges():
            is_sampled[row, start - 1 : end - 1] = True
        logprobs[row, is_sampled[row]] = torch.tensor(rollout.logprobs.tolist())
    return tokens, logprobs, is_sampled


def save_weights(policy: PreTrainedModel, folder: Path, version: int) -> PolicyManifest:
    """Write the weights to a new folder, which generation reads. The last four versions are kept."""
    final = folder / "policies" / f"{version:08d}"
    policy.save_pretrained(final)
    shutil.rmtree(folder / "policies" / f"{version - 4:08d}", ignore_errors=True)
    return PolicyManifest(version, version * STEPS_PER_BATCH, str(final), shards_of(final))


async def pass_at_1(
    problems: Sequence[Problem],
    manifest: PolicyManifest,
    generation: GenerationClient,
    verifier: VerifierClient,
    config: Config,
) -> float:
    """The share of the problems that one program of this policy solves, sampled and graded by the services."""
    by_id = {problem.problem_id: problem for problem in problems}
    drawn = Sampling(max_new_tokens=config.generation.sampling.max_new_tokens)
    tasks = [
        Task(f"held-out/{name}", f"held-out/{name}", name, problem.prompt, drawn) for name, problem in by_id.items()
    ]

    async def solves(rollout: Rollout) -> bool:
        problem = by_id[rollout.problem_id]
        verdict = await verifier.grade(problem.grading_rules().submission(problem.tests, rollout.text))
        assert not verdict.is_ours, verdict.detail  # a failure of the service is no wrong program
        return verdict.kind is VerdictKind.ACCEPTED

    await generation.use_policy(manifest)
    async with asyncio.TaskGroup() as gradings:
        graded = [
            gradings.create_task(solves(rollout))
            async for rollout in generation.generate(tasks, PATIENCE_S, Pin(manifest.policy_version, PATIENCE_S))
        ]
    return sum(task.result() for task in graded) / len(problems)


@contextmanager
def services(config_file: Path, logs: Path) -> Iterator[None]:
    """Broker, verifier and generation as processes, which are stopped at the end. Their logs are files."""
    started = []
    try:
        for name, *options in (("broker",), ("verifier", "--broker"), ("generation",)):
            command = [*NOUSCODER, "serve", name, "--config", str(config_file), *options]
            with (logs / f"{name}.log").open("wb") as log:
                started.append(subprocess.Popen(command, stdout=log, stderr=log))
        yield
    finally:
        for process in reversed(started):  # the broker last, because the others give back what they hold
            process.terminate()
            process.wait()


@contextmanager
def running(root: Path, batches: int, seed: int, sizes: dict[str, object]) -> Iterator[tuple[Config, Qwen3ForCausalLM]]:
    """Make problems and the first policy in `root`, and run the services: the configuration, and the policy."""
    logging.basicConfig(level=logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)  # the services need the other core
    root.mkdir(exist_ok=True)
    config_file = root / "one-file.toml"
    sockets = socket_folder(root)  # no other user of this machine may enter it
    addresses = {name: f"unix:{sockets / name}" for name in ("broker", "verifier", "generation")}
    config_file.write_text(
        SETTINGS.format(root=root, seed=seed, batches=batches, **sizes, **addresses), encoding="utf8"
    )
    config = load_config(config_file)
    print(f"warm start on demonstrations, in {config.run.folder}", flush=True)
    with (root / "prepare.log").open("wb") as log:
        subprocess.run([*NOUSCODER, "prepare-run", str(config_file)], stdout=log, stderr=log, check=True)
    policy = load_pretrained(Qwen3ForCausalLM, config.run.folder / "policy", dtype=torch.float32)
    with services(config_file, root):
        yield config, policy


def main() -> None:
    """Run the loop, and print what it has learned."""
    parser = argparse.ArgumentParser(description="reinforcement learning of a small policy, on one page")
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="few problems and hardly a warm start: shows that it runs")
    parser.add_argument("--folder", type=Path, help="a new folder for weights and logs; default: a temporary one")
    given = parser.parse_args()
    started = time.monotonic()
    root = (given.folder or Path(tempfile.mkdtemp(prefix="one-file-rl-"))).resolve()
    with running(root, given.batches, given.seed, SMALL if given.small else FULL) as (config, policy):
        warm_start = (time.monotonic() - started) / 60
        before, after = asyncio.run(run(config, policy))
    minutes = (time.monotonic() - started) / 60
    print(f"pass@1 {before:.3f} before, {after:.3f} after; {minutes:.1f} minutes, {warm_start:.1f} of them warm start")
    if given.small:
        print("With --small the policy can solve nothing yet, so 0.000 is right: it shows that the loop runs.")
        print("Without it pass@1 rises from 0.44 to about 0.85, in 10 to 16 minutes.")


if __name__ == "__main__":
    main()
