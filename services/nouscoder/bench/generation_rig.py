"""A real broker and a real generation service, with an imitated learner and verifier, for measurements."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from nouscoder.bench.broker_process import running_broker
from nouscoder.bench.generation_offline import MAX_NEW_TOKENS, MAX_TOKENS_TOTAL
from nouscoder.bench.measuring import BenchError
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
_LAST_LINES = 20
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

    `another_service` starts a second worker of the same run, and stops it (SIGTERM) at the end of its context.
    """

    generation: GenerationClient
    learner: BrokerClient
    another_service: Callable[[], AbstractAsyncContextManager[GenerationClient]]
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
                answer.add_done_callback(self._note)

    async def _answer(self, verifier: BrokerClient, gradings: Sequence[LeasedGrading]) -> None:
        await asyncio.sleep(self.grading_s)
        wrong = Verdict(VerdictKind.WRONG_ANSWER, passed=0, total=1, graded=1, duration_s=0.01, backend="bench")
        await verifier.submit_verdicts([(item.lease.lease_id, item.rollout_id, wrong) for item in gradings])

    def _note(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append(error)


@asynccontextmanager
async def running_rig(python: str, policies: Path, problems: Path, settings: Sequence[str]) -> AsyncIterator[Rig]:
    """Starts broker, service and verifier, and publishes the first policy. Raises BenchError."""
    overrides = [
        *_BROKER_SETTINGS,
        f'problems.train="{problems}"',
        f"generation.sampling.max_new_tokens={MAX_NEW_TOKENS}",
    ]
    async with running_broker(_BATCH, *overrides) as broker:
        ours = [*settings, f"broker.grpc={broker.address}", "generation.grpc=127.0.0.1:0"]

        @asynccontextmanager
        async def another_service() -> AsyncIterator[GenerationClient]:
            async with _service(python, ours) as (address, _), GenerationClient(address) as client:
                yield client

        async with (
            _service(python, ours) as (address, pauses_s),
            GenerationClient(address) as generation,
            BrokerClient(broker.address, "learner-bench-0-1") as learner,
            BrokerClient(broker.address, "verifier-bench-0-1") as verifier,
        ):
            rig = Rig(generation, learner, another_service, policies, pauses_s)
            grading = asyncio.create_task(rig.grade(verifier))
            grading.add_done_callback(rig._note)
            try:
                await rig.publish()
                yield rig
            finally:
                grading.cancel()
                await asyncio.gather(grading, return_exceptions=True)


@asynccontextmanager
async def _service(python: str, settings: Sequence[str]) -> AsyncIterator[tuple[str, list[float]]]:
    """A generation service: its address, and a list that gets the seconds of each pause for an update."""
    command = [python, "-m", "nouscoder", "serve", "generation", *(f"--set={setting}" for setting in settings)]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    pauses_s: list[float] = []
    last: deque[str] = deque(maxlen=_LAST_LINES)
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def read(stream: asyncio.StreamReader) -> None:
        async for line in stream:
            last.append(line.decode(errors="replace"))
            record = {}
            with suppress(ValueError):  # lines of libraries
                record = json.loads(line)
            if record.get("event") == "listening":
                listening.set_result(record["grpc"])
            elif record.get("event") == "policy taken over":
                pauses_s.append(record["pause_s"])
        if not listening.done():
            listening.set_exception(BenchError("the service ended while it started:\n" + "".join(last)))

    reading = asyncio.create_task(read(process.stderr))
    try:
        yield await asyncio.wait_for(listening, _START_LIMIT_S), pauses_s
    except TimeoutError:
        raise BenchError(f"the service did not start within {_START_LIMIT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
