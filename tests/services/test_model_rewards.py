"""A reward model beside verified rewards: what it adds to advantages, what it leaves alone, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from nouscoder.config import Config, LearnerSection, RewardModelSection, RunSection
from nouscoder.config.run import PolicySection
from nouscoder.errors import Unusable
from nouscoder.learner.model.reward_scores import ModelRewards, whitened
from nouscoder.learner.model.synthetic import random_batch, random_policy, write_policy_folder
from nouscoder.learner.scoring import score
from nouscoder.learner.trainer import Trainer
from nouscoder.objectives.advantage import AdvantageSection
from nouscoder.policy_folder.tokenizer import load_tokenizer
from nouscoder.reward_model.model import end_token_of, head_of, load_reward_model, new_reward_model, scores_of


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(policy, reward model with a random head)."""
    base = tmp_path_factory.mktemp("folders")
    policy, reward = base / "policy", base / "reward"
    write_policy_folder(policy, random_policy(0))
    model = new_reward_model(policy)
    generator = torch.Generator().manual_seed(1)
    nn.init.normal_(head_of(model).weight, generator=generator)
    write_policy_folder(reward, model)
    return policy, reward


def config_of(policy: Path, reward: RewardModelSection) -> Config:
    learner = LearnerSection(steps_per_batch=2, learning_rate=1e-3, reward_model=reward)
    return Config(run=RunSection(root=policy.parent), policy=PolicySection(path=policy), learner=learner)


def trained(policy: Path, reward: RewardModelSection) -> tuple[Trainer, dict[str, float], float | None]:
    """(trainer, advantages by rollout, correlation) after one batch."""
    trainer = Trainer(random_policy(0), config_of(policy, reward))
    batch = random_batch(0, seed=3)
    found = trainer.train_batch(batch)
    assert [one.graded for one in found.scored] == [graded for own in batch.groups().values() for graded in own]
    names = {one.graded.rollout.rollout_id: one.advantage for one in found.scored}
    return trainer, names, found.statistics.model_reward_correlation


def test_a_model_of_weight_0_is_only_compared_with_the_verified_rewards(folders: tuple[Path, Path]) -> None:
    policy, reward = folders
    plain, advantages, nothing = trained(policy, RewardModelSection())
    watched, same, correlation = trained(policy, RewardModelSection(path=str(reward)))
    assert nothing is None
    assert correlation is not None
    assert -1 < correlation < 1
    assert same == advantages
    for name, weight in plain.model.state_dict().items():
        assert torch.equal(watched.model.state_dict()[name], weight), name


def test_whitened_scores_are_added_to_the_rewards_of_advantages(folders: tuple[Path, Path]) -> None:
    policy, reward = folders
    _, advantages, _ = trained(policy, RewardModelSection(path=str(reward), weight=0.5))
    batch = random_batch(0, seed=3)
    model = load_reward_model(reward)
    end = end_token_of(load_tokenizer(reward))  # the rollouts have no stop token, so it follows them
    scores = [scores_of(model, [[*graded.rollout.token_ids, end]], 4096)[0] for graded in batch.rollouts]
    mean, deviation = torch.tensor(scores).mean(), torch.tensor(scores).std(correction=0)
    terms = {
        graded.rollout.rollout_id: 0.5 * float((value - mean) / deviation)
        for graded, value in zip(batch.rollouts, scores, strict=True)
    }
    expected = {
        one.graded.rollout.rollout_id: one.advantage for own in score(batch, AdvantageSection(), terms) for one in own
    }
    assert advantages == pytest.approx(expected, abs=1e-4)
    assert advantages != pytest.approx(trained(policy, RewardModelSection())[1], abs=1e-2)


def test_a_reward_model_that_cannot_be_used_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    policy, reward = folders
    with pytest.raises(Unusable, match="is no reward model but Qwen3ForCausalLM"):
        trained(policy, RewardModelSection(path=str(policy)))
    other = tmp_path / "other"
    write_policy_folder(other, load_reward_model(reward))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["§"] = vocabulary.pop("~")
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(Unusable, match=r"the reward model .* has other tokens than the policy"):
        ModelRewards(policy, torch.device("cpu")).use(LearnerSection(reward_model=RewardModelSection(path=str(other))))


def test_whitened_values_have_mean_0_and_deviation_1() -> None:
    found = whitened([1.0, 2.0, 3.0, 6.0])
    assert sum(found) == pytest.approx(0.0)
    assert sum(value**2 for value in found) / 4 == pytest.approx(1.0)
    assert whitened([5.0, 5.0]) == [0.0, 0.0]
