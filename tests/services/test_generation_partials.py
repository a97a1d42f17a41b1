"""A rollout that was interrupted is continued from its kept tokens, by any environment and in any turn."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from nouscoder.broker.core import Broker
from nouscoder.broker.process import serve_broker
from nouscoder.config import FeedbackSection
from nouscoder.demo.policy import EOS_ID, CharTokenizer
from nouscoder.domain.partial import PartialRollout, tokens_from
from nouscoder.domain.policy import PolicyManifest, Shard
from nouscoder.domain.problem import GradingRules, PublicTests
from nouscoder.domain.rollout import Rollout, Sampling, Task
from nouscoder.domain.submission import StdinCase, StdinTests, Submission
from nouscoder.domain.tokens import Completion, FinishReason, SampledTokens, VersionSpan, float32, int32, spans_of
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.generation import partials
from nouscoder.generation.engines.base import SampleRequest
from nouscoder.generation.engines.fake import FakeEngine
from nouscoder.generation.engines.stepped import SteppedEngine
from nouscoder.generation.environments.base import Environment
from nouscoder.generation.environments.prompts import Episode, SingleTurn
from nouscoder.generation.environments.tools import SessionCalls, Tools
from nouscoder.generation.environments.with_tools import Feedback
from nouscoder.generation.metrics import GenerationMetrics
from nouscoder.generation.partials import ResumableSampler
from nouscoder.generation.rollouts import Rollouts
from nouscoder.generation.weights.policies import Policies
from nouscoder.generation.worker import RolloutWorker
from nouscoder.policy_folder.tokenizer import PolicyTokenizer
from nouscoder.rpc.broker_client import BrokerClient

LIMIT_S = 120.0
STOP = frozenset({EOS_ID})
PUBLIC = PublicTests(StdinTests((StdinCase("1 2\n", "3\n"),)), GradingRules(text_is_code=True))
TASK = Task("r0", "g0", "p0", "Add.", Sampling(max_new_tokens=400, seed=7), public_tests=PUBLIC)


class Model:
    """Answers the n-th turn of a rollout with the n-th text. A request that goes on from kept tokens gets the rest."""

    def __init__(self, *texts: str, version: int = 0) -> None:
        self._answers = [[*CharTokenizer().encode(text), EOS_ID] for text in texts]
        self._version = version
        self.requests: list[SampleRequest] = []
        self.num_sampled = 0

    def sample(self, request: SampleRequest) -> asyncio.Future[Completion]:
        self.requests.append(request)
        _, _, turn = request.request_id.partition("/")
        rest = self._answers[int(turn or 0)][request.num_kept :][: request.sampling.max_new_tokens]
        self.num_sampled += len(rest)
        reason = FinishReason.STOP if rest[-1] == EOS_ID else FinishReason.LENGTH
        logprobs = float32([-1.0 - self._version] * len(rest))
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        future.set_result(Completion(int32(rest), logprobs, (VersionSpan(self._version, len(rest)),), reason))
        return future


@dataclass
class Grader:
    """Refuses each program with the same words."""

    words: str = "no"

    def interpreter(self) -> AbstractAsyncContextManager[SessionCalls]:
        raise NotImplementedError

    async def grade(self, submission: Submission) -> Verdict:
        return Verdict(VerdictKind.RUNTIME_ERROR, 0, 1, 1, 0.1, "test", detail=self.words)


def feedback(tokenizer: PolicyTokenizer, grader: Grader) -> Environment:
    return Feedback(tokenizer, FeedbackSection(kind="feedback", turns=3), Tools(grader, LIMIT_S), 2000)


def beginning(rollout: Rollout, num_tokens: int) -> PartialRollout:
    """The first tokens of a rollout, as a worker would have reported them."""
    parts: list[Any] = []
    whole = tokens_from(parts_of(rollout), 0).parts()
    for part in whole:
        size = len(part.token_ids) if isinstance(part, SampledTokens) else len(part)
        left = num_tokens - sum(len(p.token_ids) if isinstance(p, SampledTokens) else len(p) for p in parts)
        if left <= 0:
            break
        parts.append(part if left >= size else first_of(part, left))
    return tokens_from(parts, 0)


def first_of(part: Any, size: int) -> Any:
    if not isinstance(part, SampledTokens):
        return part[:size]
    versions = [span.policy_version for span in part.versions for _ in range(span.num_tokens)]
    return SampledTokens(part.token_ids[:size], part.logprobs[:size], spans_of(versions[:size]))


def parts_of(rollout: Rollout) -> list[Any]:
    return PartialRollout(0, False, rollout.segments, rollout.token_ids, rollout.logprobs, rollout.versions).parts()


TEXTS = ("print(1)", "print(22)", "print(333)")


async def test_a_rollout_of_several_turns_goes_on_wherever_it_was_cut(tokenizer: PolicyTokenizer) -> None:
    whole = await feedback(tokenizer, Grader()).rollout(TASK, Model(*TEXTS))
    assert [segment.is_sampled for segment in whole.segments] == [False, True] * 3
    first = whole.segments[0].num_tokens
    for num_tokens in range(first + 1, len(whole.token_ids), 3):
        kept = beginning(whole, num_tokens)
        model = Model(*TEXTS, version=5)
        sampler = ResumableSampler(model, kept)
        assert sampler.oldest_version == 0
        again = await feedback(tokenizer, Grader()).rollout(TASK, sampler)
        assert (again.segments, again.text, again.finish_reason) == (whole.segments, whole.text, whole.finish_reason)
        assert list(again.token_ids) == list(whole.token_ids)
        num_kept = kept.num_sampled_tokens
        assert list(again.logprobs[:num_kept]) == list(kept.logprobs)
        assert set(again.logprobs[num_kept:]) <= {-6.0}
        assert again.versions == (VersionSpan(0, num_kept), VersionSpan(5, whole.num_sampled_tokens - num_kept))
        assert model.num_sampled == whole.num_sampled_tokens - num_kept, "no kept token is sampled again"
        assert (sampler.num_continued, sampler.num_dropped) == (num_kept, 0)


async def test_a_whole_kept_rollout_needs_no_engine(tokenizer: PolicyTokenizer) -> None:
    whole = await feedback(tokenizer, Grader()).rollout(TASK, Model(*TEXTS))
    model = Model(*TEXTS)
    kept = beginning(whole, len(whole.token_ids))
    assert await feedback(tokenizer, Grader()).rollout(TASK, ResumableSampler(model, kept)) == whole
    assert model.requests == []


async def test_tokens_after_another_answer_of_a_tool_are_dropped(tokenizer: PolicyTokenizer) -> None:
    whole = await feedback(tokenizer, Grader("first")).rollout(TASK, Model(*TEXTS))
    model = Model(*TEXTS, version=5)
    sampler = ResumableSampler(model, beginning(whole, len(whole.token_ids) - 1))
    again = await feedback(tokenizer, Grader("second")).rollout(TASK, sampler)
    fresh = await feedback(tokenizer, Grader("second")).rollout(TASK, Model(*TEXTS))
    assert list(again.token_ids) == list(fresh.token_ids)
    turn = whole.segments[1].num_tokens
    assert again.versions == (VersionSpan(0, turn), VersionSpan(5, whole.num_sampled_tokens - turn))
    assert sampler.num_continued == turn
    assert sampler.num_dropped == whole.num_sampled_tokens - turn - 1
    assert sampler.num_saved_sampled == 0, "the broker gets all tokens again"


async def test_tokens_after_another_prompt_are_dropped(single_turn: SingleTurn) -> None:
    whole = await single_turn.rollout(TASK, Model("print(1)"))
    sampler = ResumableSampler(Model("print(1)", version=5), beginning(whole, len(whole.token_ids) - 2))
    again = await single_turn.rollout(replace(TASK, prompt="Subtract."), sampler)
    assert again.versions == (VersionSpan(5, whole.num_sampled_tokens),)
    assert sampler.oldest_version == 5


async def test_kept_tokens_count_in_the_limit_of_the_rollout(single_turn: SingleTurn) -> None:
    task = replace(TASK, sampling=replace(TASK.sampling, max_new_tokens=6))
    whole = await single_turn.rollout(task, Model("print(12345)"))
    assert (whole.num_sampled_tokens, whole.finish_reason) == (6, FinishReason.LENGTH)
    prompt = whole.segments[0].num_tokens
    for num_kept in range(1, 7):
        kept = beginning(whole, prompt + num_kept)
        again = await single_turn.rollout(task, ResumableSampler(Model("print(12345)"), kept))
        assert again == whole
    longer = beginning(whole, prompt + 6)
    short = replace(task, sampling=replace(task.sampling, max_new_tokens=3))
    again = await single_turn.rollout(short, ResumableSampler(Model("print(12345)"), longer))
    assert again.num_sampled_tokens == 3


async def test_an_environment_whose_turns_do_not_follow_one_another_is_sampled_and_never_saved(
    single_turn: SingleTurn,
) -> None:
    sampler = ResumableSampler(Model("one", "two"))
    for prompt in ([5, 6], [7, 8]):
        episode = Episode(TASK, sampler, STOP)
        episode.give(prompt)
        await episode.sample()
    assert sampler.unsaved(None) is None


# Workers


def published(folder: Path, version: int) -> PolicyManifest:
    """A file that the fake engine accepts as weights, and its manifest."""
    data = (8).to_bytes(8, "little") + b"weights" + bytes([version])
    path = folder / f"{version}.safetensors"
    path.write_bytes(data)
    shard = Shard(path.name, hashlib.sha256(data).hexdigest(), len(data))
    return PolicyManifest(version, version, str(folder), (shard,))


def long_script(request: SampleRequest) -> list[int]:
    """NUM_TOKENS - 1 tokens that depend on the rollout and on their place."""
    own = request.prompt_token_ids[: len(request.prompt_token_ids) - request.num_kept]
    return [own[(request.sampling.seed + place * place) % len(own)] for place in range(NUM_TOKENS - 1)]


NUM_TOKENS, EVERY, MAX_RUNNING, PREFETCH, NUM_ROLLOUTS = 120, 16, 4, 1, 16


class StoppingEngine(FakeEngine):
    """Samples `stops_at` tokens of MAX_RUNNING rollouts, which begin together, then no more until that is changed."""

    def __init__(self, stops_at: int) -> None:
        super().__init__(max_running=MAX_RUNNING, max_tokens_total=400, script=long_script)
        self.stops_at = stops_at

    def step(self) -> list[tuple[str, Completion]]:
        is_full = self.num_running + self.num_waiting >= MAX_RUNNING
        if self.stops_at == NUM_TOKENS or (is_full and min(self.progress.values(), default=0) < self.stops_at):
            return super().step()
        time.sleep(0.002)
        return []


@dataclass
class Cluster:
    """A broker over gRPC, and workers with a fake engine each."""

    broker: Broker
    address: str
    single_turn: SingleTurn

    @asynccontextmanager
    async def worker(self, number: int, stops_at: int = NUM_TOKENS) -> AsyncIterator[Worker]:
        """A worker that is drained at the end, with a StoppingEngine."""
        metrics = GenerationMetrics()
        step_engine = StoppingEngine(stops_at)
        async with (
            SteppedEngine(step_engine, metrics) as engine,
            BrokerClient(self.address, f"generation-h-{number}-1", patience_s=LIMIT_S) as client,
        ):
            policies = Policies(engine)
            rollouts = Rollouts(self.single_turn, engine, policies, metrics=metrics)
            worker = RolloutWorker(client, rollouts, policies, MAX_RUNNING, PREFETCH, partial_every_tokens=EVERY)
            running = asyncio.create_task(worker.run())
            try:
                yield Worker(step_engine, worker, metrics)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)


@dataclass
class Worker:
    engine: StoppingEngine
    worker: RolloutWorker
    metrics: GenerationMetrics

    def tokens(self, fate: str) -> float:
        name = "nouscoder_generation_partial_tokens_total"
        return self.metrics.registry.get_sample_value(name, {"fate": fate}) or 0.0


@pytest.fixture
async def cluster(
    broker_rig: Any, single_turn: SingleTurn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Cluster]:
    monkeypatch.setattr(partials, "_LOOK_EVERY_S", 0.01)
    config = broker_rig.config(
        "broker.grpc=127.0.0.1:0", "broker.lease_s=600", f"generation.sampling.max_new_tokens={NUM_TOKENS}"
    )
    broker = broker_rig.broker(config)
    async with AsyncExitStack() as stack:
        address = await serve_broker(broker, config, asyncio.Event(), stack)
        await broker.publish_policy(published(tmp_path, 0))
        yield Cluster(broker, address, single_turn)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.002)


async def submitted(broker: Broker) -> list[Rollout]:
    """Every rollout that waits for its verdict."""
    from nouscoder.store.rollout_record import decode_rollout

    redis, prefix = broker.store.redis, broker.store.prefix
    names = [key async for key in redis.scan_iter(match=f"{prefix}record:*", count=1000)]
    texts = [name.decode() if isinstance(name, bytes) else name for name in names]
    records = [await broker.store.get(text.removeprefix(prefix)) for text in texts]
    return [decode_rollout(record) for record in records if record is not None]


async def in_flight(broker: Broker, state: str) -> int:
    return (await broker.status()).ledger.in_flight[state]


async def test_a_drained_workers_rollouts_are_continued_by_another_from_their_tokens(cluster: Cluster) -> None:
    """Each token is sampled once, although the first worker ends none of these rollouts."""
    async with cluster.worker(0, stops_at=2 * EVERY + 5) as first:
        await until(lambda: min(first.engine.progress.values(), default=0) >= 2 * EVERY + 5)
        await until(lambda: first.engine.num_running == MAX_RUNNING)
        await until(lambda: first.tokens("saved") >= MAX_RUNNING * 2 * EVERY)
    saved = first.tokens("saved")
    assert saved == first.engine.num_tokens, "the drain saves what was sampled since the last report"
    async with cluster.worker(1) as second:
        await all_sampled(cluster.broker)
        assert second.tokens("continued") == saved
        assert second.engine.num_tokens == NUM_ROLLOUTS * NUM_TOKENS - saved
    for rollout in await submitted(cluster.broker):
        request = SampleRequest("", tuple(rollout.prompt_token_ids), rollout.sampling, STOP)
        assert list(rollout.sampled_token_ids) == [*long_script(request), EOS_ID]


def held_by(worker: RolloutWorker) -> int:
    return len(worker._held)


async def test_a_second_worker_joins_and_leaves_and_nothing_is_lost(cluster: Cluster) -> None:
    """Both stand still at first, so that the number of rollouts at once does not depend on the time."""
    held = MAX_RUNNING + PREFETCH
    async with cluster.worker(0, stops_at=1) as first:
        await until(lambda: held_by(first.worker) == held and first.engine.num_running == MAX_RUNNING)
        assert await in_flight(cluster.broker, "sampling") == held
        async with cluster.worker(1, stops_at=1) as second:
            await until(lambda: held_by(second.worker) == held and second.engine.num_running == MAX_RUNNING)
            assert await in_flight(cluster.broker, "sampling") == 2 * held, "twice as many rollouts at once"
            second.engine.stops_at = 3 * EVERY
            await until(lambda: min(second.engine.progress.values()) >= 3 * EVERY)
        first.engine.stops_at = NUM_TOKENS
        await all_sampled(cluster.broker)
        assert first.tokens("continued") == second.engine.num_tokens > 0
    ledger = (await cluster.broker.status()).ledger
    assert (ledger.lost, ledger.abandoned, ledger.stale, ledger.balanced) == (0, 0, 0, True)
    assert len({rollout.rollout_id for rollout in await submitted(cluster.broker)}) == NUM_ROLLOUTS


async def all_sampled(broker: Broker) -> None:
    """Wait until every rollout that may be admitted is sampled."""
    async with asyncio.timeout(LIMIT_S):
        while await in_flight(broker, "sampled") < NUM_ROLLOUTS:
            await asyncio.sleep(0.01)
