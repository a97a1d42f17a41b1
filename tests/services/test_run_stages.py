"""Services of a plan: calls for another run are refused, and the broker serves the stage that was chosen."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from nouscoder.broker.errors import Refused
from nouscoder.broker.redis_client import Stages
from nouscoder.broker.redis_server import start_redis
from nouscoder.config import Config, load_config
from nouscoder.rpc.channel import PeerUnreachable
from nouscoder.rpc.generation_client import GenerationClient
from nouscoder.rpc.server import Served, start_grpc
from nouscoder.run.stages import _with_begun_policy, _with_own_cache, has_stages
from nouscoder.v1 import generation_pb2, generation_pb2_grpc

PLAN = """
run.name = "plan"
run.services = "external"
broker.redis_url = "redis://r"
[[plan.stages]]
name = "a"
[[plan.stages]]
name = "b"
set.learner.learning_rate = 1.0
"""


@pytest.fixture
def plan(tmp_path: Path) -> Config:
    file = tmp_path / "plan.toml"
    file.write_text(PLAN)
    return load_config(file, [f'run.root="{tmp_path}"', f'generation.cache="{tmp_path / "cache"}"'])


class _Answers(generation_pb2_grpc.GenerationServiceServicer):
    async def Status(  # noqa: N802
        self,
        request: generation_pb2.GenerationServiceStatusRequest,
        context: grpc.aio.ServicerContext[object, object],
    ) -> generation_pb2.GenerationServiceStatusResponse:
        return generation_pb2.GenerationServiceStatusResponse(num_tokens=7)


async def test_a_service_answers_calls_for_its_own_run_and_those_that_name_none() -> None:
    async with AsyncExitStack() as stack:
        served = Served(
            "127.0.0.1:0",
            "127.0.0.1:0",
            [generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name],
            lambda server: generation_pb2_grpc.add_GenerationServiceServicer_to_server(_Answers(), server),  # type: ignore[abstract]
            CollectorRegistry(),
            0.0,
            run="plan/02-b",
        )
        address = await start_grpc(served, stack)
        for run in ("", "plan/02-b"):
            client = await stack.enter_async_context(GenerationClient(address, 5.0, run=run))
            assert (await client.status()).num_tokens == 7
        late = await stack.enter_async_context(GenerationClient(address, 0.0, run="plan/01-a"))
        with pytest.raises(PeerUnreachable, match="the run plan/02-b is served here, not plan/01-a"):
            await late.status()


async def test_the_broker_serves_the_stage_that_was_chosen_also_after_a_restart(plan: Config, tmp_path: Path) -> None:
    redis = await asyncio.to_thread(start_redis, tmp_path / "redis")
    try:
        stages = Stages(plan, redis.url)
        assert (await stages.current()).run.name == "plan/01-a"
        with pytest.raises(Refused, match="plan/03-c is no stage of the plan plan"):
            await stages.choose("plan/03-c")
        assert not stages.another.is_set()
        await stages.choose("plan/02-b")
        assert stages.another.is_set()
        await stages.close()
        again = Stages(plan, redis.url)
        stage = await again.current()
        await again.close()
        assert (stage.run.name, stage.learner.learning_rate) == ("plan/02-b", 1.0)
        assert not again.another.is_set()
    finally:
        redis.close()


def test_a_stage_has_a_cache_of_policies_of_its_own(plan: Config, tmp_path: Path) -> None:
    """Versions begin again in each stage: a cache of both kept 2 of the first and removed 0 of the second."""
    caches = [Path(_with_own_cache(plan, plan.stage_run(0)).generation.cache)]
    caches[0].mkdir(parents=True)
    caches.append(Path(_with_own_cache(plan, plan.stage_run(1)).generation.cache))
    assert caches == [tmp_path / "cache" / "01-a", tmp_path / "cache" / "02-b"]
    assert not caches[0].exists()


async def test_the_learner_begins_with_the_policy_that_train_chose(plan: Config, tmp_path: Path) -> None:
    stage = plan.stage_run(1)
    waiting = asyncio.ensure_future(_with_begun_policy(stage))
    await asyncio.sleep(0)
    assert not waiting.done()
    stage.run.folder.mkdir(parents=True)
    begun = stage.run.folder / "begun.toml"
    begun.write_text(f'policy.path = "{tmp_path / "chosen"}"\n')
    begun.rename(stage.run.folder / "config.toml")
    assert (await waiting).policy.path == tmp_path / "chosen"


def test_only_a_plan_with_external_services_has_stages_to_serve(plan: Config) -> None:
    assert has_stages(plan)
    assert not has_stages(Config())
    assert not has_stages(plan.stage_run(0))
