"""A generation worker is killed (SIGKILL) at 80 % of a long rollout, and another one continues it from its tokens."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from tests.contract.reference_logprobs import fresh_logprobs, replayed_logprobs

from nouscoder.bench.broker_process import RunningBroker, running_broker
from nouscoder.demo.policy import PolicySize, build_policy, save_policy
from nouscoder.domain.partial import PartialRollout
from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.rollout import Rollout
from nouscoder.domain.tokens import Completion, spans_between
from nouscoder.generation.engines.base import SampleRequest
from nouscoder.policy_folder.weights_files import shards_of
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.store.pieces import decode_pieces
from nouscoder.store.rollout_record import decode_rollout

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

NUM_TOKENS, MAX_TOKENS_TOTAL = 1500, 1700
# The policy ends a rollout with about one token in VOCABULARY, so most are cut at NUM_TOKENS.
VOCABULARY = 8192
LIMIT_S = 600.0
BROKER = (
    *("broker.pipeline_k=64", "broker.max_staleness=100", "broker.stale_policy=keep", "broker.lease_s=3"),
    *("learner.correction.kind=token_truncated", f"generation.sampling.max_new_tokens={NUM_TOKENS}"),
)


@pytest.fixture
def folders(tmp_path: Path) -> dict[int, Path]:
    """The policy of each version."""
    size = PolicySize(hidden_size=64, num_layers=2, intermediate_size=64, max_positions=MAX_TOKENS_TOTAL)
    found = {version: tmp_path / str(version) for version in range(3)}
    for version, folder in found.items():
        policy = build_policy(seed=version, size=size, vocab_size=VOCABULARY)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(3.0)  # so that the versions differ clearly
        save_policy(policy, folder)
    return found


@asynccontextmanager
async def worker(broker: RunningBroker, policy: Path, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A generation service as a process of its own, which is killed at the end."""
    settings = {
        "broker.grpc": broker.address,
        "policy.path": f'"{policy}"',
        "generation.grpc": "127.0.0.1:0",
        "generation.max_running": 4,
        "generation.max_tokens_total": MAX_TOKENS_TOTAL,
        "generation.partial_every_tokens": 20,
    }
    command = [sys.executable, "-m", "nouscoder", "serve", "generation"]
    command += [f"--set={name}={value}" for name, value in settings.items()]
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(*command, stderr=stderr)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def publish(learner: BrokerClient, version: int, folder: Path) -> None:
    shards = await asyncio.to_thread(shards_of, folder)
    await learner.publish_policy(PolicyManifest(version, version, str(folder), shards))


def partials_in(broker: RunningBroker) -> dict[str, PartialRollout]:
    """What the broker keeps of each rollout."""
    found = {}
    for key in broker.redis.scan_iter("*}:partial:*", count=1000):
        data = broker.redis.get(key)
        if isinstance(data, bytes):
            found[key.decode().rpartition(":")[2]] = decode_pieces(data)
    return found


async def longest(broker: RunningBroker, share: float) -> tuple[str, PartialRollout]:
    """Wait until the broker keeps this share of the sampled tokens of a rollout."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            for rollout_id, partial in partials_in(broker).items():
                if partial.num_sampled_tokens >= share * NUM_TOKENS:
                    return rollout_id, partial
            await asyncio.sleep(0.05)


async def finished(broker: RunningBroker, rollout_id: str) -> Rollout:
    """Wait for the rollout's record."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            for key in broker.redis.scan_iter(f"*}}:record:{rollout_id}.*", count=1000):
                record = broker.redis.get(key)
                if isinstance(record, bytes):
                    return decode_rollout(record)
            await asyncio.sleep(0.1)


def largest_difference(rollout: Rollout, num_kept: int, folders: Mapping[int, Path]) -> tuple[float, float]:
    """Of the log-probabilities of the kept tokens and of the others, from those of transformers.

    The first worker kept its keys and values when version 1 came. The second computed them anew with version 2.
    """
    request = SampleRequest("", tuple(rollout.prompt_token_ids), rollout.sampling, frozenset())
    ids, logprobs, spans = rollout.sampled_token_ids, rollout.logprobs, rollout.versions
    kept = Completion(ids[:num_kept], logprobs[:num_kept], spans_between(spans, 0, num_kept), rollout.finish_reason)
    whole = Completion(ids, logprobs, spans, rollout.finish_reason)
    by_first = replayed_logprobs(folders, request, kept) - torch.tensor(list(logprobs[:num_kept]))
    by_second = fresh_logprobs(folders[2], request, whole)[num_kept:] - torch.tensor(list(logprobs[num_kept:]))
    return float(by_first.abs().max()), float(by_second.abs().max())


async def test_a_worker_killed_at_80_percent_of_a_long_rollout_costs_only_what_it_had_not_reported(
    tmp_path: Path, folders: dict[int, Path]
) -> None:
    async with running_broker(256, *BROKER) as broker, BrokerClient(broker.address, "learner-h-0-1") as learner:
        await publish(learner, 0, folders[0])
        async with worker(broker, folders[0], tmp_path / "first.log") as first:
            await longest(broker, 0.3)
            await publish(learner, 1, folders[1])
            rollout_id, _ = await longest(broker, 0.8)
            first.kill()
            await first.wait()
        kept = partials_in(broker)[rollout_id]
        await publish(learner, 2, folders[2])
        async with worker(broker, folders[0], tmp_path / "second.log"):
            rollout = await finished(broker, rollout_id)
        ledger = (await learner.status()).ledger
    num_kept = kept.num_sampled_tokens
    assert 0.8 * NUM_TOKENS <= num_kept < rollout.num_sampled_tokens
    assert list(rollout.token_ids[: kept.end_token]) == list(kept.token_ids)
    assert list(rollout.logprobs[:num_kept]) == list(kept.logprobs)
    assert spans_between(rollout.versions, 0, num_kept) == kept.versions
    assert [span.policy_version for span in rollout.versions] == [0, 1, 2]
    by_first, by_second = largest_difference(rollout, num_kept, folders)
    print(json.dumps({"kept": num_kept, "of": rollout.num_sampled_tokens, "first": by_first, "second": by_second}))
    assert by_first < 2e-3
    assert by_second < 2e-3
    assert (ledger.lost, ledger.abandoned, ledger.stale, ledger.balanced) == (0, 0, 0, True)
