"""The trainer takes k optimizer steps on a batch. The result depends only on the batch and the state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.config import Config, LearnerSection, RunSection, ScheduleSection
from nouscoder.domain.batch import Batch, CompletedGroups, GradedRollout
from nouscoder.domain.rollout import Rollout
from nouscoder.domain.tokens import FinishReason, Segment, float32, int32, spans_of
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.learner.loading import prepare_thread
from nouscoder.learner.model.logprobs import score_tokens
from nouscoder.learner.model.packing import pack, plan
from nouscoder.learner.model.synthetic import random_batch, random_policy
from nouscoder.learner.scoring import AllGroups, minibatches, score, statistics_of
from nouscoder.learner.state.run_log import BatchSeconds, metrics_lines
from nouscoder.learner.trainer import Trainer, TrainingError, TrainingInterrupted
from nouscoder.objectives.advantage import AdvantageSection, group_advantages

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    threads = torch.get_num_threads()
    prepare_thread(1)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def config(*, microbatch_tokens: int = 16384, steps_per_batch: int = 4, warmup_steps: int = 0, **more: float) -> Config:
    return Config(
        run=RunSection(seed=3),
        learner=LearnerSection(
            learning_rate=more.get("learning_rate", 1e-2),
            max_gradient_norm=more.get("max_gradient_norm", 1.0),
            microbatch_tokens=microbatch_tokens,
            steps_per_batch=steps_per_batch,
            schedule=ScheduleSection(warmup_steps=warmup_steps),
        ),
    )


def rollouts_of(batch: Batch) -> list[Rollout]:
    return [graded.rollout for graded in batch.rollouts]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


# ---- packing ----


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200))
def test_a_plan_has_every_rollout_once_within_the_budget(lengths: list[int], budget: int) -> None:
    parts = plan(lengths, budget)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or sum(lengths[index] for index in part) <= budget


def test_packed_targets_and_positions_are_those_of_the_loss_tokens() -> None:
    rollout = replace(
        rollouts_of(random_batch(0, seed=1))[0],
        segments=(Segment(2, False), Segment(1, True), Segment(2, False), Segment(2, True)),
        token_ids=int32([3, 4, 5, 6, 7, 8, 9]),
        logprobs=float32([-1.0, -2.0, -3.0]),
        versions=spans_of([0, 0, 0]),
    )
    (part,) = pack([rollout], 1000, CPU)
    assert part.targets.tolist() == [5, 8, 9]
    assert part.positions.tolist() == [1, 4, 5], "the position before a token must predict it"
    assert part.input_ids.tolist() == [[3, 4, 5, 6, 7, 8]], "the last token predicts nothing"
    assert part.sampler_logprobs.tolist() == [-1.0, -2.0, -3.0]


# ---- log-probabilities ----


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_and_entropies_are_those_of_a_plain_forward_pass_without_padding(temperature: float) -> None:
    model = random_policy(0)
    rollouts = [at_temperature(rollout, temperature) for rollout in rollouts_of(random_batch(0, seed=2))]
    for budget in (64, 100_000):  # many micro-batches, and one
        for part in pack(rollouts, budget, CPU):
            scores = score_tokens(model, part)
            for row, index in enumerate(part.rollout_indices):
                ids = torch.tensor([rollouts[index].token_ids.tolist()])
                logits = model(input_ids=ids).logits[0, len(rollouts[index].prompt_token_ids) - 1 : -1] / temperature
                expected = logits.log_softmax(-1)
                chosen = expected[range(len(expected)), rollouts[index].sampled_token_ids.tolist()]
                torch.testing.assert_close(scores.logprobs[part.rollout_of_token == row], chosen, rtol=1e-4, atol=1e-5)
                entropies = -(expected.exp() * expected).sum(-1)
                torch.testing.assert_close(
                    scores.entropies[part.rollout_of_token == row], entropies, rtol=1e-4, atol=1e-5
                )


# ---- a batch ----


def test_minibatches_are_disjoint_whole_groups_in_an_order_by_seed_and_batch() -> None:
    groups = score(random_batch(0, seed=5, num_groups=6, group_size=3), AdvantageSection())
    cut = minibatches(groups, 4, seed=1, batch_id=7)
    assert [len(part) for part in cut] == [6, 6, 3, 3]
    for part in cut:
        ids = [scored.graded.rollout.group_id for scored in part]
        assert all(ids.count(group_id) == 3 for group_id in ids)
    seen = [scored.graded.rollout.rollout_id for part in cut for scored in part]
    assert sorted(seen) == sorted(scored.graded.rollout.rollout_id for group in groups for scored in group)
    assert minibatches(groups, 4, seed=1, batch_id=7) == cut
    assert minibatches(groups, 4, seed=1, batch_id=8) != cut
    with pytest.raises(ValueError, match="too few for 7 steps"):
        minibatches(groups, 7, seed=1, batch_id=7)


def test_advantages_come_from_the_rewards_of_the_batch_and_not_from_its_verdicts() -> None:
    batch = random_batch(0, seed=5, num_groups=1, group_size=4)
    rewards = [0.1, 0.25, 1 / 3, 0.7]
    own = replace(
        batch, rollouts=tuple(replace(item, reward=r) for item, r in zip(batch.rollouts, rewards, strict=True))
    )
    (group,) = score(own, AdvantageSection())
    cut = [item.graded.rollout.is_overlong for item in group]
    assert [item.advantage for item in group] == group_advantages(rewards, cut)
    assert statistics_of(group).reward_mean == sum(rewards) / 4


def test_statistics_of_a_batch_by_hand() -> None:
    batch = random_batch(4, seed=5, policy_version=4)
    scored = [item for group in score(batch, AdvantageSection()) for item in group]
    figures = statistics_of(scored)
    right = [g for g in batch.rollouts if g.verdict.kind is VerdictKind.ACCEPTED]
    assert figures.pass_rate == len(right) / len(batch.rollouts)
    assert figures.reward_mean == pytest.approx(2 * figures.pass_rate - 1)
    assert figures.response_length_correct == sum(g.rollout.num_sampled_tokens for g in right) / len(right)
    assert figures.staleness_max == 1
    assert 0 < figures.staleness_mean <= 1
    assert statistics_of([item for item in scored if item.accepted]).response_length_incorrect is None
    assert figures.same_programs == 0.0, "random programs differ"
    assert statistics_of(scored[:1]).same_programs is None
    assert statistics_of([scored[0]] * 3).same_programs == 1.0


def test_pass_at_g_counts_groups_and_the_figures_of_all_groups_come_from_the_broker() -> None:
    """Two trained groups, one of which has an accepted rollout; a third group was filtered."""
    batch = random_batch(0, seed=5, num_groups=2, group_size=4)
    wrong = Verdict(VerdictKind.WRONG_ANSWER, 0, 1, 1, 0.1, "test")
    right = Verdict(VerdictKind.ACCEPTED, 1, 1, 1, 0.1, "test")
    verdicts = [right, *[wrong] * 7]
    rollouts = tuple(replace(item, verdict=one) for item, one in zip(batch.rollouts, verdicts, strict=True))
    completed = CompletedGroups(groups=3, solved=2, rollouts=12, accepted=5, reward_sum=-2.0)
    scored = [item for group in score(replace(batch, rollouts=rollouts), AdvantageSection()) for item in group]
    assert statistics_of(scored).pass_at_g == 0.5
    assert statistics_of(scored).all_groups is None, "unknown"
    assert statistics_of(scored, completed).all_groups == AllGroups(3, -2 / 12, 5 / 12, 2 / 3)
    assert statistics_of(scored, replace(completed, groups=0, rollouts=0)).all_groups is None
    trained = Trainer(random_policy(0), config()).train_batch(replace(random_batch(0, seed=1), completed=completed))
    (first, *_) = metrics_lines(trained, 1, BatchSeconds())
    assert first["all_groups"] == {"groups": 3, "reward_mean": -2 / 12, "pass_rate": 5 / 12, "pass_at_g": 2 / 3}


def test_the_first_step_of_a_batch_is_on_policy_and_later_ones_are_not() -> None:
    steps = Trainer(random_policy(0), config()).train_batch(random_batch(0, seed=1)).steps
    assert [step.step for step in steps] == [1, 2, 3, 4]
    first, last = steps[0].diagnostics, steps[-1].diagnostics
    assert (first["ratio_min"], first["ratio_max"], first["approximate_kl"]) == (1.0, 1.0, 0.0)
    assert last["ratio_min"] < 1.0 < last["ratio_max"]
    assert 0 < last["effective_sample_size"] <= 1
    assert last["approximate_kl"] > 0
    assert first["mismatch_kl"] > 0, "the synthetic sampler must be another policy"


def test_old_log_probabilities_are_those_before_the_first_step() -> None:
    """The ratio of the last minibatch compares with the weights before the k steps, not with those one step ago."""
    batch = random_batch(0, seed=1)
    trainer = Trainer(random_policy(0), config(steps_per_batch=4))
    steps = trainer.train_batch(batch).steps
    cut = minibatches(score(batch, AdvantageSection()), 4, seed=3, batch_id=0)
    last = [scored.graded.rollout for scored in cut[-1]]
    # The weights before step 4, from the same run stopped after three steps.
    other = Trainer(random_policy(0), config(steps_per_batch=4))
    packed, scorer = [other._pack(part) for part in cut], other._computation.scorer
    prepared = [replace(part, old_scores=other._scores(scorer, part.parts)) for part in packed]
    first_steps = [other._take_step(part, 0.0) for part in prepared[:3]]
    assert [step.loss for step in first_steps] == [step.loss for step in steps[:3]], "bit for bit"
    start = random_policy(0)
    ratios = [
        (score_tokens(other.model, part).logprobs - score_tokens(start, part).logprobs).exp().detach()
        for part in pack(last, 16384, CPU)
    ]
    assert steps[-1].diagnostics["ratio_max"] == pytest.approx(float(torch.cat(ratios).max()), rel=1e-5)


def test_micro_batches_and_padding_do_not_change_losses_gradients_or_weights() -> None:
    runs = []
    for tokens in (100_000, 80, 1):  # one micro-batch, several, one per rollout (without padding)
        trainer = Trainer(random_policy(0), config(microbatch_tokens=tokens, steps_per_batch=2))
        runs.append((trainer.train_batch(random_batch(0, seed=1)).steps, weights(trainer)))
    (steps, expected), *others = runs
    for other_steps, other_weights in others:
        for a, b in zip(steps, other_steps, strict=True):
            assert (b.loss, b.gradient_norm) == pytest.approx((a.loss, a.gradient_norm), rel=1e-4, abs=1e-6)
            assert b.diagnostics["entropy"] == pytest.approx(a.diagnostics["entropy"], rel=1e-4)
            assert b.num_tokens == a.num_tokens
        for name, tensor in expected.items():
            torch.testing.assert_close(other_weights[name], tensor, rtol=1e-2, atol=1e-4)


def test_same_state_and_batch_give_the_same_bits() -> None:
    runs = []
    for _ in range(2):
        trainer = Trainer(random_policy(0), config(microbatch_tokens=120))
        runs.append(
            ([s.loss for b in (0, 1) for s in trainer.train_batch(random_batch(b, seed=1)).steps], weights(trainer))
        )
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(tensor, runs[1][1][name]) for name, tensor in runs[0][1].items())


def test_rewarded_tokens_become_likelier_and_punished_ones_less() -> None:
    batch = random_batch(0, seed=1, num_groups=8)
    trainer = Trainer(random_policy(0), config(steps_per_batch=1, learning_rate=1e-3))
    scored = {s.graded.rollout.rollout_id: s.advantage for group in score(batch, AdvantageSection()) for s in group}

    def gain() -> float:
        total = 0.0
        with torch.no_grad():
            for part in pack(rollouts_of(batch), 16384, CPU):
                logprobs = score_tokens(trainer.model, part).logprobs
                advantages = [scored[batch.rollouts[i].rollout.rollout_id] for i in part.rollout_indices]
                total += float((torch.tensor(advantages)[part.rollout_of_token] * logprobs).sum())
        return total

    before = gain()
    trainer.train_batch(batch)
    assert gain() > before


def test_overlong_rollouts_do_not_move_the_weights() -> None:
    batch = random_batch(0, seed=1)
    cut = replace(batch, rollouts=tuple(replace_finish(graded) for graded in batch.rollouts))
    trainer = Trainer(random_policy(0), config())
    before = weights(trainer)
    steps = trainer.train_batch(cut).steps
    assert all(step.loss == 0 and step.gradient_norm == 0 and step.num_tokens > 0 for step in steps)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())


def replace_finish(graded: GradedRollout) -> GradedRollout:
    return replace(graded, rollout=replace(graded.rollout, finish_reason=FinishReason.LENGTH))


def test_warm_up_is_linear_and_the_gradient_norm_is_reported_before_clipping() -> None:
    trainer = Trainer(random_policy(0), config(warmup_steps=3, learning_rate=4e-3, max_gradient_norm=1e-3))
    steps = [step for b in (0, 1) for step in trainer.train_batch(random_batch(b, seed=1)).steps]
    assert [step.learning_rate for step in steps[:5]] == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3, 4e-3])
    assert all(step.gradient_norm > 1e-3 for step in steps)


def at_temperature(rollout: Rollout, temperature: float) -> Rollout:
    return replace(rollout, sampling=replace(rollout.sampling, temperature=temperature))


def test_each_rollout_is_scored_at_its_sampling_temperature() -> None:
    """In a micro-batch of different temperatures, each rollout has the same scores as alone."""
    model = random_policy(0)
    plain = rollouts_of(random_batch(0, seed=1))
    mixed = [at_temperature(rollout, (0.5, 1.0, 2.0)[number % 3]) for number, rollout in enumerate(plain)]
    (together,) = pack(mixed, 100_000, CPU)
    scores = score_tokens(model, together)
    for row, index in enumerate(together.rollout_indices):
        (alone,) = pack([mixed[index]], 100_000, CPU)
        torch.testing.assert_close(
            scores.logprobs[together.rollout_of_token == row], score_tokens(model, alone).logprobs
        )
    coldest, hottest = (score_tokens(model, pack([at_temperature(plain[0], t)], 9999, CPU)[0]) for t in (0.5, 2.0))
    assert float(coldest.entropies.mean()) < float(hottest.entropies.mean())


def test_a_greedy_rollout_is_refused_by_name() -> None:
    rollout = at_temperature(rollouts_of(random_batch(0, seed=1))[0], 0.0)
    with pytest.raises(ValueError, match=rf"{rollout.rollout_id} was sampled at temperature 0"):
        pack([rollout], 1000, CPU)


# ---- refused input ----


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_raise_without_a_step(bad: float) -> None:
    trainer = Trainer(random_policy(0), config())
    with torch.no_grad():
        trainer.model.model.norm.weight[0] = bad
    before = weights(trainer)
    with pytest.raises(
        TrainingError, match="not finite: the training has diverged; begin again from an earlier version"
    ):
        trainer.train_batch(random_batch(0, seed=1))
    assert trainer.step == 0
    torch.testing.assert_close(trainer.model.state_dict()["lm_head.weight"], before["lm_head.weight"])


def test_a_gradient_that_is_not_finite_raises_before_the_step() -> None:
    trainer = Trainer(random_policy(0), config())
    before = weights(trainer)
    trainer.model.lm_head.weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(
        TrainingError, match=r"gradient of step 1 has norm nan .*: the training has diverged; resume with a lower"
    ):
        trainer.train_batch(random_batch(0, seed=1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())


def test_a_reward_that_is_not_finite_is_refused() -> None:
    batch = random_batch(0, seed=1)
    bad = replace(batch.rollouts[3], reward=float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        Trainer(random_policy(0), config()).train_batch(replace(batch, rollouts=(*batch.rollouts[:3], bad)))


def test_an_interrupted_trainer_stops_before_its_next_step() -> None:
    trainer = Trainer(random_policy(0), config())
    trainer.interrupt()
    with pytest.raises(TrainingInterrupted):
        trainer.train_batch(random_batch(0, seed=1))
    assert trainer.step == 0


# ---- replay ----


def test_replayed_batches_are_trained_on_beside_the_new_one_and_its_figures_are_its_own() -> None:
    earlier, batch = random_batch(0, seed=1), random_batch(1, seed=1, policy_version=1)
    runs = []
    for replayed in ([], [earlier], [earlier]):
        trainer = Trainer(random_policy(0), config(steps_per_batch=2))
        runs.append((trainer.train_batch(batch, replayed), weights(trainer)))
    (alone, _), (trained, once), (_, again) = runs
    tokens = [sum(rollout.num_sampled_tokens for rollout in rollouts_of(one)) for one in (batch, earlier)]
    assert sum(step.num_tokens for step in alone.steps) == tokens[0]
    assert sum(step.num_tokens for step in trained.steps) == sum(tokens)
    assert (alone.num_replayed, trained.num_replayed) == (0, len(earlier.rollouts))
    assert (trained.scored, trained.statistics) == (alone.scored, alone.statistics)
    assert all(torch.equal(tensor, again[name]) for name, tensor in once.items()), "bit for bit"
