"""Fixtures of several folders: the settings of hypothesis, runner pods for tests marked `cluster`, and one vLLM."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from nouscoder.config import SandboxSection
from nouscoder.config.generation import GenerationSection

# No deadline for examples, because times on a busy machine say nothing about the code.
settings.register_profile("no-deadline", settings(), deadline=None)
settings.load_profile("no-deadline")

# Modal's client leaves tasks whose failures nobody retrieves: asyncio logs each when it is collected, during any test.
logging.getLogger("asyncio").addFilter(lambda record: "/modal/" not in record.getMessage())

# Files with the longest tests come first, so that no core is left with one of them at the end.
_LONGEST_FIRST = (
    "tests/e2e/test_loop.py",
    "tests/attacks/test_attack_corpus.py",
    "tests/services/test_verifier_large_bodies.py",
    "tests/services/test_verifier_gateway_limits.py",
    "tests/services/test_attached_run.py",
    "tests/services/test_bench_broker.py",
    "tests/load",
    "tests/e2e",
    "tests/fuzz",
    "tests/services/test_run_services.py",
    "tests/services/test_on_policy.py",
    "tests/services",
)

CHART = Path(__file__).parents[1] / "helm" / "nouscoder"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by _LONGEST_FIRST; the order within a file stays."""

    def rank(item: pytest.Item) -> int:
        places = (place for place, start in enumerate(_LONGEST_FIRST) if item.nodeid.startswith(start))
        return min(places, default=len(_LONGEST_FIRST))

    items.sort(key=rank)


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command that a test calls in this process configures the logs of all. The next test has them as they were."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def runner_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxSection]:
    """Pods of gVisor, of the chart's template, in their own namespace, made by a gateway on this machine."""
    with _pool_of_pods("gvisor", "baseline", tmp_path_factory.mktemp("pool")) as section:
        yield section


@pytest.fixture(scope="session")
def userns_runner_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxSection]:
    """The same with users of their own. Skips where the cluster's nodes have no user namespaces for pods."""
    features = '{.items[*].status.runtimeHandlers[?(@.name=="runc")].features.userNamespaces}'
    if os.environ.get("KUBECONFIG") and "true" not in _output("kubectl", "get", "nodes", "-o", f"jsonpath={features}"):
        pytest.skip("the nodes have no user namespaces for pods: they need containerd 2 and runc 1.2, or CRI-O")
    with _pool_of_pods("userns", "privileged", tmp_path_factory.mktemp("pool")) as section:
        yield section


@pytest.fixture(scope="session")
def claimed_runner_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxSection]:
    """Pods of gVisor from a SandboxWarmPool of agent-sandbox, whose controller runs on this machine meanwhile."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG names no cluster: run make test-cluster")
    from tests.cluster import agent_sandbox  # it reads YAML, which not every test may import

    program, folder = tmp_path_factory.mktemp("agent-sandbox"), tmp_path_factory.mktemp("pool")
    with agent_sandbox.running(program), _pool_of_pods("gvisor", "baseline", folder, "agentSandbox") as section:
        yield section


@contextmanager
def _pool_of_pods(backend: str, standard: str, folder: Path, source: str = "pods") -> Iterator[SandboxSection]:
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG names no cluster: run make test-cluster")
    namespace = f"nouscoder-pool-{secrets.token_hex(3)}-sandbox"
    tag = os.environ.get("NOUSCODER_IMAGE_TAG", "")
    # The chart puts runners into the namespace of its release and "-sandbox".
    command = ["helm", "template", "nouscoder", str(CHART), "--namespace", namespace.removesuffix("-sandbox")]
    values = [f"verifier.sandbox.backend={backend}", f"image.tag={tag}", "global.imageRegistry=localhost"]
    command += ["--set", ",".join([*values, f"verifier.sandbox.pool.source={source}"])]
    rendered = _output(*command, "-s", "templates/sandbox/sandbox-configmap.yaml")
    key, (secret, field) = secrets.token_hex(32), ("nouscoder-sandbox-key", "key")
    (folder / "runner-pod.json").write_text(rendered.partition(".json: |")[2])
    (folder / "key").write_text(key)
    _output("kubectl", "create", "namespace", namespace)
    _output("kubectl", "label", "namespace", namespace, f"pod-security.kubernetes.io/enforce={standard}")
    try:
        _output("kubectl", "-n", namespace, "create", "secret", "generic", secret, f"--from-literal={field}={key}")
        if source == "agentSandbox":
            made = _output(*command, "-s", "templates/sandbox/sandbox-warmpool.yaml")
            (folder / "pool.yaml").write_text(made)
            _output("kubectl", "apply", "-f", str(folder / "pool.yaml"))
        template, key_file = str(folder / "runner-pod.json"), str(folder / "key")
        pool = {"pool_template": template, "pool_key_file": key_file, "pool_spares": 0, "pool_start_s": 120}
        yield SandboxSection(backend=backend, slots=1, **pool)
    finally:
        _output("kubectl", "delete", "namespace", namespace, "--wait=true", "--timeout=120s")


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    if done.returncode:
        pytest.fail(f"{' '.join(command)} exited with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


@pytest.fixture(scope="session")
def random_policy() -> Callable[..., Path]:
    """Saves a small random Qwen3 policy of 64 tokens in a folder: `random_policy(folder, seed=0, max_positions=64)`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def save(folder: Path, *, seed: int = 0, max_positions: int = 64) -> Path:
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=max_positions,
            initializer_range=0.2,
            tie_word_embeddings=True,
        )
        Qwen3ForCausalLM(config).save_pretrained(folder)
        return folder

    return save


class SharedVllm:
    """Takes the place of `start_vllm`: one vLLM for all engines, because a start takes a minute.

    Closing an engine aborts its requests and ends its pause. The weights of the engine before stay loaded, so a test
    that sampled without loading a policy would see them.
    """

    def __init__(self, start: Callable[..., Any], folder: Path) -> None:
        self._start = start
        self._folder = folder
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_step: Callable[[int], None] = lambda _: None
        self.llm: Any = None

    def __call__(self, settings: GenerationSection, folder: Path, max_tokens_total: int, on_step: Any) -> Any:
        if self.llm is None:
            shared = settings.model_copy(update={"max_running": 64})
            self.llm = self._start(shared, self._folder, 256, lambda num_tokens: self._on_step(num_tokens))
        self._on_step = on_step
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llm, name)

    def shutdown(self) -> None:
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self._clear(), self._loop).result(60)

    async def _clear(self) -> None:
        await self.llm.abort(list(self.llm.output_processor.request_states), internal=True)
        await self.llm.pause_generation(mode="keep", clear_cache=True)
        self._on_step = lambda _: None
        await self.llm.resume_generation()

    def bind(self) -> None:
        self._loop = asyncio.get_running_loop()


@pytest.fixture(scope="session")
async def shared_vllm(
    tmp_path_factory: pytest.TempPathFactory, random_policy: Callable[..., Path]
) -> AsyncIterator[SharedVllm]:
    """The vLLM that all tests marked `vllm` share."""
    from nouscoder.generation.engines import vllm_start

    folder = tmp_path_factory.mktemp("shared-policy")
    random_policy(folder, max_positions=256)
    shared = SharedVllm(vllm_start.start_vllm, folder)
    shared.bind()
    yield shared
    if shared.llm is not None:
        await asyncio.to_thread(shared.llm.shutdown)
