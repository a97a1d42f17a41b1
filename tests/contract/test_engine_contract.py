"""One suite for every engine: what the service relies on, whichever engine is configured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from nouscoder.config import Config, load_config
from nouscoder.demo.tokenizer import CharTokenizer
from nouscoder.domain.rollout import FinishReason, Rollout, Sampling, Task
from nouscoder.generation.engines import Engine, EngineError, open_engine
from nouscoder.generation.engines.base import EngineUnusable

MAX_RUNNING, MAX_TOKENS_TOTAL = 4, 40

# Tiny tensors: more threads would only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def run_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a random policy that hardly ever ends a rollout by itself."""
    root = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=CharTokenizer().vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
    )
    Qwen3ForCausalLM(config).save_pretrained(root / "run/policy")
    CharTokenizer().save(root / "run/policy")
    return root


@pytest.fixture(params=["torch", "fake"])
def config(request: pytest.FixtureRequest, run_root: Path) -> Config:
    return load_config(
        None,
        [
            f"run.root={run_root}",
            f"generation.engine={request.param}",
            f"generation.max_running={MAX_RUNNING}",
            f"generation.max_tokens_total={MAX_TOKENS_TOTAL}",
        ],
    )


@pytest.fixture
def weights(run_root: Path) -> Path:
    return run_root / "run/policy/model.safetensors"


@pytest.fixture
def engine(config: Config, weights: Path) -> Engine:
    made = open_engine(config)
    made.load_policy([weights], 3)
    return made


def task(number: int, max_new_tokens: int = 6, prompt: str = "") -> Task:
    sampling = Sampling(max_new_tokens=max_new_tokens, seed=number + 1)
    return Task(f"r{number}", f"g{number // 2}", f"p{number // 2}", prompt or f"task {number // 2}", sampling)


def drain(engine: Engine, at_step: Callable[[int], None] = lambda step: None) -> list[Rollout]:
    done: list[Rollout] = []
    for step in range(500):
        if not engine.num_running and not engine.num_waiting:
            return done
        at_step(step)
        done += engine.step()
    raise AssertionError("the engine does not come to an end")


def test_the_configured_engine_is_opened(config: Config) -> None:
    assert open_engine(config).name == config.generation.engine


@pytest.mark.parametrize(
    ("content", "says"), [(None, "holds no config.json"), ('{"model_type": "gpt2"}', "runs qwen2, qwen3")]
)
def test_a_folder_that_holds_no_policy_is_refused_by_name(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(EngineUnusable, match=rf"{tmp_path}.*{says}"):
        open_engine(load_config(None, [f"policy.path={tmp_path}"]))


def test_every_task_leaves_exactly_once_and_never_more_run_than_may(engine: Engine) -> None:
    tasks = [task(number, max_new_tokens=2 + number % 7) for number in range(15)]
    for each in tasks:
        engine.add(each)
    most = 0

    def watch(step: int) -> None:
        nonlocal most
        most = max(most, engine.num_running)

    rollouts = drain(engine, watch)
    assert sorted(rollout.rollout_id for rollout in rollouts) == sorted(each.rollout_id for each in tasks)
    assert most == MAX_RUNNING
    assert engine.num_tokens == sum(rollout.num_sampled_tokens for rollout in rollouts)
    by_id = {each.rollout_id: each for each in tasks}
    for rollout in rollouts:
        asked = by_id[rollout.rollout_id]
        assert (rollout.group_id, rollout.problem_id) == (asked.group_id, asked.problem_id)
        assert rollout.num_sampled_tokens <= asked.sampling.max_new_tokens


def test_tasks_may_join_while_others_run(engine: Engine) -> None:
    engine.add(task(0, max_new_tokens=8))
    engine.step()
    engine.add(task(1, max_new_tokens=3))
    assert {rollout.rollout_id for rollout in drain(engine)} == {"r0", "r1"}


def test_same_task_gives_the_same_rollout(engine: Engine) -> None:
    engine.add(task(0))
    (first,) = drain(engine)
    engine.add(task(0))
    assert drain(engine) == [first]


def test_every_token_carries_the_version_it_was_sampled_under(engine: Engine, weights: Path) -> None:
    engine.add(task(0, max_new_tokens=7))
    engine.add(task(1, max_new_tokens=2))

    def swap(step: int) -> None:
        if step == 3:
            engine.load_policy([weights], 4)

    rollouts = {rollout.rollout_id: rollout for rollout in drain(engine, swap)}
    assert [(span.policy_version, span.num_tokens) for span in rollouts["r0"].versions] == [(3, 3), (4, 4)]
    assert [span.policy_version for span in rollouts["r1"].versions] == [3]
    assert engine.policy_version == 4


@pytest.mark.parametrize("content", [None, b"", b"no weights at all"])
def test_weights_that_cannot_be_read_are_refused_and_change_nothing(
    engine: Engine, weights: Path, tmp_path: Path, content: bytes | None
) -> None:
    bad = tmp_path / "bad.safetensors"
    if content is not None:
        bad.write_bytes(content)
    with pytest.raises(EngineError, match=r"bad\.safetensors"):
        engine.load_policy([weights, bad], 4)
    assert engine.policy_version == 3
    engine.add(task(0))
    assert [span.policy_version for span in drain(engine)[0].versions] == [3]


def test_nothing_is_sampled_without_a_policy(config: Config) -> None:
    engine = open_engine(config)
    assert engine.policy_version is None
    engine.add(task(0))
    with pytest.raises(EngineError, match="no policy"):
        engine.step()


def test_cancelled_tasks_leave_without_a_rollout_and_free_their_place(engine: Engine) -> None:
    for number in range(7):
        engine.add(task(number))
    engine.step()
    engine.cancel("r0")  # running
    engine.cancel("r6")  # waiting
    engine.cancel("never seen")
    assert {rollout.rollout_id for rollout in drain(engine)} == {"r1", "r2", "r3", "r4", "r5"}


def test_a_cancelled_id_may_come_again(engine: Engine) -> None:
    engine.add(task(0))
    engine.step()
    engine.cancel("r0")
    engine.add(task(0))
    assert len(drain(engine)) == 1


def test_max_new_tokens_cuts_a_rollout(engine: Engine) -> None:
    engine.add(task(0, max_new_tokens=1))
    (rollout,) = drain(engine)
    assert (rollout.num_sampled_tokens, rollout.finish_reason) == (1, FinishReason.LENGTH)


def test_max_tokens_total_cuts_a_rollout(engine: Engine) -> None:
    engine.add(task(0, max_new_tokens=1000, prompt="x" * (MAX_TOKENS_TOTAL - 4)))
    (rollout,) = drain(engine)
    assert rollout.finish_reason is FinishReason.LENGTH
    assert len(rollout.token_ids) == MAX_TOKENS_TOTAL


@pytest.mark.parametrize(("prompt", "says"), [("", "empty"), ("x" * MAX_TOKENS_TOTAL, "leaves no room")])
def test_a_prompt_that_cannot_be_answered_is_refused_by_name(engine: Engine, prompt: str, says: str) -> None:
    bad = Task("r9", "g", "p", prompt, Sampling())
    with pytest.raises(EngineError, match=rf"task r9.*{says}"):
        engine.add(bad)
    assert engine.num_waiting == 0


def test_one_id_cannot_be_here_twice(engine: Engine) -> None:
    engine.add(task(0))
    with pytest.raises(EngineError, match="task r0 is already here"):
        engine.add(task(0))
    engine.step()
    with pytest.raises(EngineError, match="task r0 is already here"):
        engine.add(task(0))
