"""`nouscoder train --smoke64`: the choice of problems, the verdict, and the same end after a stop at any point."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nouscoder.config import Config, ConfigError, load_config
from nouscoder.data.pass_rates import PassCount
from nouscoder.data.problems import save_problems
from nouscoder.domain.guards import BatchRewards, Direction, reward_trend
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import StdinCase, StdinTests
from nouscoder.errors import Unusable
from nouscoder.learner.model.synthetic import random_policy, write_policy_folder
from nouscoder.run import smoke
from nouscoder.run.folder import RunFolder
from nouscoder.run.smoke import SmokeTest, default_batches, smoke_config, training_config
from nouscoder.run.smoke_problems import solved_sometimes
from nouscoder.run.view import PlainView, View

NUM_PROBLEMS = 8
FILE = """
[run]
name = "mine"
[problems]
train = "train.jsonl"
held_out = "train.jsonl"
[policy]
path = "model"
[broker]
group_size = 4
batch_size = 8
[broker.curriculum]
name = "epochs"
retire_after = 1
[generation]
max_tokens_total = 64
sampling.max_new_tokens = 32
[learner]
steps_per_batch = 2
"""


class Stopped(BaseException):
    """The process is killed."""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """20 problems, of which the even ones are solved sometimes."""
    tests = StdinTests((StdinCase("1", "2"),))
    save_problems(tmp_path / "train.jsonl", [Problem(f"p{n:02}", "Add one.", tests) for n in range(20)])
    write_policy_folder(tmp_path / "model", random_policy(0))
    (tmp_path / "mine.toml").write_text(FILE)
    lines = [
        {"problem_id": f"p{n:02}", "passed": 2 if n % 2 == 0 else 4 * (n % 4 // 2), "sampled": 4} for n in range(20)
    ]
    (tmp_path / "rates.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load_config(tmp_path / "mine.toml", [f'run.root="{tmp_path / "runs"}"'])


def rewards_of(batch_id: int, names: list[str], rate: float) -> BatchRewards:
    draw = random.Random(batch_id)
    return BatchRewards(
        batch_id, {name: tuple(1.0 if draw.random() < rate else -1.0 for _ in range(8)) for name in names}
    )


def imitated(rates: dict[int, float]) -> Any:
    """A run in which batch b has the pass rate of rates[b], with all problems in each batch."""

    async def run(folder: RunFolder, config: Config, view: View, started_s: float) -> None:
        names = list(config.broker.curriculum.problem_ids)  # type: ignore[union-attr]
        with (folder.path / "rewards.jsonl").open("w") as output:
            for batch_id, rate in rates.items():
                rewards = rewards_of(batch_id, names, rate).rewards
                output.write(json.dumps({"step": batch_id, "batch_id": batch_id, "rewards": rewards}) + "\n")
        folder.write_json("summary.json", {"name": config.run.name})

    return run


async def go(config: Config, test: SmokeTest, *, resume: bool = False) -> dict[str, Any]:
    return await smoke.run_test(config, test, PlainView(Console(quiet=True)), resume=resume)


def smoke_of(tmp_path: Path) -> SmokeTest:
    return SmokeTest(num_batches=9, pass_rates=tmp_path / "rates.jsonl", num_problems=NUM_PROBLEMS)


RISING = {batch: 0.2 + 0.07 * batch for batch in range(9)}


async def test_a_rising_reward_on_the_chosen_problems(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke, "run_loop", imitated(RISING))
    result = await go(config, smoke_of(tmp_path))
    assert result["direction"] == "rises"
    assert 0 < result["low"] < result["gain"] < result["high"]
    assert (result["num_problems"], result["num_batches"]) == (NUM_PROBLEMS, 9)
    folder = config.run.root / "mine-smoke64"
    chosen = json.loads((folder / "problems.json").read_text())["problem_ids"]
    assert len(chosen) == NUM_PROBLEMS
    assert all(int(name[1:]) % 2 == 0 for name in chosen), "only those with 0 < pass rate < 1"
    recorded = load_config(folder / "02-training" / "config.toml")
    assert recorded.broker.curriculum.problem_ids == tuple(chosen)  # type: ignore[union-attr]
    assert not recorded.broker.drop_zero_variance
    assert "gain" in smoke.sentence(result)


@pytest.mark.parametrize(
    ("rates", "direction"),
    [(dict.fromkeys(range(9), 0.5), "undecided"), ({b: 0.9 - 0.07 * b for b in range(9)}, "falls")],
)
async def test_a_reward_that_does_not_rise(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rates: dict[int, float], direction: str
) -> None:
    monkeypatch.setattr(smoke, "run_loop", imitated(rates))
    assert (await go(config, smoke_of(tmp_path)))["direction"] == direction


@pytest.mark.parametrize(("rates", "code"), [(RISING, 0), (dict.fromkeys(range(9), 0.5), 1)])
async def test_the_exit_code_and_the_json(
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rates: dict[int, float],
    code: int,
) -> None:
    monkeypatch.setattr(smoke, "run_loop", imitated(rates))
    assert await smoke.smoke64(config, smoke_of(tmp_path), resume=False, as_json=True) == code
    result = json.loads(capsys.readouterr().out)
    assert (result["direction"] == "rises") is (code == 0)
    assert await smoke.smoke64(config, smoke_of(tmp_path), resume=True, as_json=False) == code
    assert "in the last, gain" in capsys.readouterr().out


@pytest.mark.parametrize("after_the_training", [False, True])
async def test_a_killed_test_goes_on_with_the_same_problems(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_the_training: bool
) -> None:
    """The file of pass rates is not read again."""
    ran = 0

    async def killed(folder: RunFolder, config: Config, view: View, started_s: float) -> None:
        nonlocal ran
        ran += 1
        if after_the_training:
            await imitated(RISING)(folder, config, view, started_s)
        raise Stopped

    monkeypatch.setattr(smoke, "run_loop", killed)
    with pytest.raises(Stopped):
        await go(config, smoke_of(tmp_path))
    before = (config.run.root / "mine-smoke64" / "problems.json").read_text()
    (tmp_path / "rates.jsonl").unlink()
    monkeypatch.setattr(smoke, "run_loop", imitated(RISING))
    result = await go(config, smoke_of(tmp_path), resume=True)
    assert result["direction"] == "rises"
    assert (config.run.root / "mine-smoke64" / "problems.json").read_text() == before
    assert ran == 1
    monkeypatch.setattr(smoke, "run_loop", None)
    assert await go(config, smoke_of(tmp_path), resume=True) == result, "a finished test only shows its result"


async def test_too_few_problems_are_a_sentence(config: Config, tmp_path: Path) -> None:
    test = SmokeTest(num_batches=9, pass_rates=tmp_path / "rates.jsonl")
    with pytest.raises(Unusable, match="10 problems of the training file have 0 < pass rate < 1, not 64"):
        await go(config, test)


def test_what_cannot_be_tested_is_a_sentence(config: Config) -> None:
    external = config.model_copy(update={"run": config.run.model_copy(update={"services": "external"})})
    with pytest.raises(ConfigError, match="starts its services itself"):
        smoke_config(external, SmokeTest())
    with pytest.raises(ConfigError, match="at least 3"):
        smoke_config(config, SmokeTest(num_batches=2))


def test_the_training_has_each_problem_in_each_third(config: Config) -> None:
    """8 problems and 2 groups in a batch: each third has 4 batches."""
    assert default_batches(NUM_PROBLEMS, config) == 12
    assert default_batches(64, config) == 96
    training = training_config(smoke_config(config, SmokeTest()), ("p00", "p02"))
    assert training.run.name == "mine-smoke64/02-training"
    assert training.broker.curriculum.name == "subset"
    assert training.run.total_batches == 96


def test_solved_sometimes_keeps_the_order() -> None:
    counts = {"a": PassCount(0, 4), "b": PassCount(1, 4), "c": PassCount(4, 4), "d": PassCount(3, 4)}
    assert solved_sometimes(counts, ["d", "c", "b", "a", "e"], 5) == ("d", "b")
    assert solved_sometimes(counts, ["d", "c", "b", "a", "e"], 1) == ("d",)


def test_the_gain_compares_each_problem_with_itself() -> None:
    """Hard problems first and easy ones last are no gain; problems of one third only are left out."""
    batches = [
        BatchRewards(0, {"hard": (0.0, 0.0), "easy": (1.0,), "early": (0.0,)}),
        BatchRewards(1, {"easy": (0.0, 0.0)}),
        BatchRewards(2, {"easy": (1.0, 1.0, 1.0), "hard": (0.0,), "late": (1.0,)}),
    ]
    trend = reward_trend(batches, 3)
    assert (trend.num_problems, trend.gain, trend.low, trend.high) == (2, 0.0, 0.0, 0.0)
    assert trend.direction is Direction.UNDECIDED
    with pytest.raises(ValueError, match="no problem is in both"):
        reward_trend(batches[:1], 3)


def test_noise_alone_is_rarely_called_a_rise() -> None:
    """Of 60 trainings without any change about 2.5 % are; the seeds are fixed."""
    names = [f"p{number}" for number in range(64)]
    rises = 0
    for seed in range(60):
        batches = [rewards_of(1000 * seed + batch, names, 0.4) for batch in range(3)]
        shifted = [BatchRewards(index, batch.rewards) for index, batch in enumerate(batches)]
        rises += reward_trend(shifted, 3, seed).direction is Direction.RISES
    assert rises <= 6
