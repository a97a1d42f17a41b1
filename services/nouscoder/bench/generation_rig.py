"""A real broker and a real generation service, with an imitated learner and verifier, for the bench of generation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nouscoder.bench.broker_process import running_broker
from nouscoder.bench.generation_offline import MAX_NEW_TOKENS, MAX_TOKENS_TOTAL
from nouscoder.bench.measuring import LogRecord, started
from nouscoder.domain.lease import LeasedGrading
from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.policy_folder.weights_files import shards_of
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.generation_client import GenerationClient

_START_LIMIT_S = 600.0
_GRADED_AT_ONCE = 64
_GRADING_WAIT_S = 20.0
_BATCH = 256
_VLLM_CACHE_BYTES = 2**30
# No group grows too old, and admission is never the limit, because nothing is trained on.
_BROKER_SETTINGS = (
    *("broker.pipeline_k=64", "broker.max_staleness=100000", "broker.stale_policy=keep"),
    *("broker.lease_s=120", "learner.correction.kind=token_truncated"),
)


def engine_settings(engine: str, policy: Path, overrides: Sequence[str]) -> list[str]:
    """The settings of the service, which the engine alone gets too."""
    # Without a bound, vLLM takes nearly all memory of the device, and here two engines share it.
    cache = (f"generation.vllm.kv_cache_memory_bytes={_VLLM_CACHE_BYTES}",) if engine == "vllm" else ()
    return [
        *(f"generation.engine={engine}", f'policy.path="{policy}"', f"generation.max_tokens_total={MAX_TOKENS_TOTAL}"),
        *(f"generation.sampling.max_new_tokens={MAX_NEW_TOKENS}", *cache, *overrides),
    ]


@dataclass
class Rig:
    """Everything runs while the context of `running_rig` is open. `grading_s`: how long the verifier takes.

    `command` starts the service, and `pauses_s` has the seconds of each of its pauses for an update.
    """

    generation: GenerationClient
    learner: BrokerClient
    command: Sequence[str]
    policies: Path
    pauses_s: list[float]
    grading_s: float = 0.0
    num_published: int = 0
    failures: list[BaseException] = field(default_factory=list)

    async def publish(self) -> None:
        """Publish the next policy version: the two policies in turn."""
        folder = self.policies / str(self.num_published % 2)
        shards = await asyncio.to_thread(shards_of, folder)
        await self.learner.publish_policy(PolicyManifest(self.num_published, self.num_published, str(folder), shards))
        self.num_published += 1

    async def grade(self, verifier: BrokerClient) -> None:
        """Grade rollouts after `grading_s`, as many at a time as there are. All are wrong, so groups are filtered."""
        answering: set[asyncio.Task[None]] = set()
        while True:
            gradings = (await verifier.lease_grading(_GRADED_AT_ONCE, _GRADING_WAIT_S)).gradings
            if gradings:
                answer = asyncio.create_task(self._answer(verifier, gradings))
                answering.add(answer)
                answer.add_done_callback(answering.discard)
                answer.add_done_callback(self.note)

    async def _answer(self, verifier: BrokerClient, gradings: Sequence[LeasedGrading]) -> None:
        await asyncio.sleep(self.grading_s)
        wrong = Verdict(VerdictKind.WRONG_ANSWER, passed=0, total=1, graded=1, duration_s=0.01, backend="bench")
        await verifier.submit_verdicts([(item.lease.lease_id, item.rollout_id, wrong) for item in gradings])

    def note(self, task: asyncio.Task[None]) -> None:
        """Keep the failure of a task that has ended."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append(error)


@asynccontextmanager
async def running_rig(python: str, policies: Path, problems: Path, settings: Sequence[str]) -> AsyncIterator[Rig]:
    """Starts broker, service and verifier, and publishes the first policy. Raises BenchError."""
    overrides = [f'problems.train="{problems}"', f"generation.sampling.max_new_tokens={MAX_NEW_TOKENS}"]
    async with running_broker(_BATCH, *_BROKER_SETTINGS, *overrides) as broker:
        ours = [*settings, f"broker.grpc={broker.address}", "generation.grpc=127.0.0.1:0"]
        command = [python, "-m", "nouscoder", "serve", "generation", *(f"--set={setting}" for setting in ours)]
        pauses_s: list[float] = []
        async with (
            running_worker(command, pauses_s) as generation,
            BrokerClient(broker.address, "learner-bench-0-1") as learner,
            BrokerClient(broker.address, "verifier-bench-0-1") as verifier,
        ):
            rig = Rig(generation, learner, command, policies, pauses_s)
            grading = asyncio.create_task(rig.grade(verifier))
            grading.add_done_callback(rig.note)
            try:
                await rig.publish()
                yield rig
            finally:
                grading.cancel()
                await asyncio.gather(grading, return_exceptions=True)


@asynccontextmanager
async def running_worker(command: Sequence[str], pauses_s: list[float]) -> AsyncIterator[GenerationClient]:
    """A generation service, which is stopped (SIGTERM) at the end. `pauses_s` gets its pauses for updates."""

    def told(record: LogRecord) -> None:
        if record.get("event") == "policy taken over":
            pauses_s.append(record["pause_s"])

    texts = ("the service ended while it started:\n{log}", f"the service did not start within {_START_LIMIT_S:.0f} s")
    async with (
        started(command, "grpc", _START_LIMIT_S, *texts, told) as (_, address),
        GenerationClient(address) as client,
    ):
        yield client
