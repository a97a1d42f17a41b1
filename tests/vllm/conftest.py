"""Engines over the shared vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from nouscoder.config import load_config
from nouscoder.generation.engines import open_engine
from nouscoder.generation.engines.base import Engine
from nouscoder.generation.metrics import GenerationMetrics

OpenVllm = Callable[..., AbstractAsyncContextManager[Engine]]
NUM_POLICIES = 4


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory, random_policy: Callable[..., Path]) -> list[Path]:
    """Folders of policies that differ in all weights; the number of each is the seed of its weights."""
    folder = tmp_path_factory.mktemp("policies")
    return [random_policy(folder / str(seed), seed=seed, max_positions=256) for seed in range(NUM_POLICIES)]


@pytest.fixture
def open_vllm(shared_vllm: object, policies: list[Path], monkeypatch: pytest.MonkeyPatch) -> OpenVllm:
    """Opens an engine with `on_update` over the shared vLLM."""
    monkeypatch.setattr("nouscoder.generation.engines.vllm.start_vllm", shared_vllm)

    @asynccontextmanager
    async def opened(on_update: str = "recompute", max_running: int = 8) -> AsyncIterator[Engine]:
        settings = {
            "engine": "vllm",
            "max_running": max_running,
            "max_tokens_total": 256,
            "vllm.on_update": on_update,
            "vllm.dtype": "float32",
            "vllm.enforce_eager": "true",
            "vllm.kv_cache_memory_bytes": 64 * 2**20,
        }
        config = load_config(None, [f"generation.{name}={value}" for name, value in settings.items()])
        async with open_engine(config, policies[0], GenerationMetrics()) as engine:
            yield engine

    return opened
