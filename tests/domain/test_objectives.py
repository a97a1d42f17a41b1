"""Each objective against a reference written out in loops of plain floats, and the identities of the papers.

The references share no code with the objectives. Values and gradients agree to 1e-9 in float64.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nouscoder.config import LearnerSection
from nouscoder.objectives.aggregation import Aggregation
from nouscoder.objectives.base import LossInputs, MinibatchCounts
from nouscoder.objectives.cispo import Cispo
from nouscoder.objectives.correction import CorrectionKind, CorrectionSection
from nouscoder.objectives.dapo import Dapo
from nouscoder.objectives.distillation import Distillation
from nouscoder.objectives.entropy import EntropySection
from nouscoder.objectives.entry_point import EntryPointObjective
from nouscoder.objectives.gppo import Gppo
from nouscoder.objectives.grpo import Grpo
from nouscoder.objectives.gspo import Gspo
from nouscoder.objectives.loss import ObjectiveSection, SharedTerms, SurrogateLoss
from nouscoder.objectives.ppo import Ppo, Proximal
from nouscoder.objectives.reference_kl import KlEstimator, ReferenceKlSection
from nouscoder.objectives.registry import OBJECTIVES, PUBLISHED, objective_of
from nouscoder.objectives.reinforce_plus_plus import ReinforcePlusPlus

BONUS = 0.3  # the entropy coefficient that the trainer would give


@dataclass(frozen=True)
class Token:
    """Log-probabilities under four policies, and an entropy."""

    new: float
    old: float
    sampler: float
    reference: float
    entropy: float


@dataclass(frozen=True)
class Row:
    """One rollout: its loss tokens, its advantage, whether every test passed."""

    tokens: tuple[Token, ...]
    advantage: float
    accepted: bool


@dataclass(frozen=True)
class Case:
    """An objective with all its settings."""

    objective: Any  # an ObjectiveSection
    shared: SharedTerms


# ---- the reference: loops of plain floats ----


def bound(log_ratio: float) -> float:
    return max(-20.0, min(20.0, log_ratio))


def share_of(case: Case, rows: Sequence[Row], row: Row) -> float:
    how = case.objective.aggregation
    if how is Aggregation.TOKEN_MEAN:
        count = 0
        for other in rows:
            count += len(other.tokens)
        return 1.0 / count
    if how is Aggregation.SEQUENCE_MEAN:
        return 1.0 / len(rows) / len(row.tokens)
    return 1.0 / len(rows) / float(case.objective.divisor_tokens)


def weight_of(section: CorrectionSection, row: Row, token: Token) -> float:
    log_k = token.old - token.sampler
    if section.kind in (CorrectionKind.SEQUENCE_TRUNCATED, CorrectionKind.SEQUENCE_MASKED):
        log_k = 0.0
        for other in row.tokens:
            log_k += other.old - other.sampler
    if section.kind is CorrectionKind.GEOMETRIC_TRUNCATED:
        log_k = sum(other.old - other.sampler for other in row.tokens) / len(row.tokens)
    k = math.exp(bound(log_k))
    if section.kind is CorrectionKind.NONE:
        return 1.0
    if section.kind is CorrectionKind.TOKEN:
        return k
    if section.kind.value.endswith("_truncated"):
        return k if k < section.cap else section.cap
    if section.kind is CorrectionKind.TOKEN_MASKED:
        return k if section.floor <= k <= section.cap else 0.0
    return k if k <= section.cap else 0.0


def clipped_gain(objective: Any, log_ratio: float, advantage: float) -> tuple[float, float]:
    """The gain, and its derivative by the logarithm of the ratio."""
    ratio = math.exp(bound(log_ratio))
    moves = -20.0 <= log_ratio <= 20.0
    dual = getattr(objective, "dual_clip", 0.0)
    if advantage < 0 and dual and ratio > dual:
        return dual * advantage, 0.0
    if advantage > 0 and ratio > 1 + objective.clip_high:
        return (1 + objective.clip_high) * advantage, 0.0
    if advantage < 0 and ratio < 1 - objective.clip_low:
        return (1 - objective.clip_low) * advantage, 0.0
    return ratio * advantage, ratio * advantage if moves else 0.0


def gain_of(case: Case, row: Row, index: int, anchor: Row) -> tuple[float, list[float]]:
    """The gain of one token and its derivatives by every log-probability of the rollout.

    `anchor` holds the values of everything under a stop-gradient.
    """
    objective, token, fixed, size = case.objective, row.tokens[index], anchor.tokens[index], len(row.tokens)
    slopes = [0.0] * size
    log_ratio = token.new - token.old
    if isinstance(objective, Gspo):
        mean = 0.0
        for other in row.tokens:
            mean += (other.new - other.old) / size
        gain, slope = clipped_gain(objective, mean, row.advantage)
        return gain, [slope / size] * size
    if isinstance(objective, Cispo):
        weight = math.exp(bound(fixed.new - fixed.old))
        weight = min(max(weight, 1 - objective.clip_low), 1 + objective.clip_high)
        slopes[index] = weight * row.advantage
        return weight * row.advantage * token.new, slopes
    if isinstance(objective, Gppo):
        held = math.exp(bound(fixed.new - fixed.old))
        for outside, limit in (
            (row.advantage < 0 and held < 1 - objective.clip_low, objective.beta_low * (1 - objective.clip_low)),
            (row.advantage > 0 and held > 1 + objective.clip_high, objective.beta_high * (1 + objective.clip_high)),
        ):
            if outside:
                gain = limit * math.exp(token.new - fixed.new) * row.advantage
                slopes[index] = gain
                return gain, slopes
        if objective.dual_clip and row.advantage < 0 and held > objective.dual_clip:
            return objective.dual_clip * row.advantage, slopes
        gain = math.exp(bound(log_ratio)) * row.advantage
        slopes[index] = gain if -20.0 <= log_ratio <= 20.0 else 0.0
        return gain, slopes
    if isinstance(objective, Distillation):
        wanted = token.reference - token.old + objective.reward_weight * row.advantage
        gain = math.exp(bound(log_ratio)) * wanted
        slopes[index] = gain if -20.0 <= log_ratio <= 20.0 else 0.0
        return gain, slopes
    if isinstance(objective, Ppo) and objective.proximal is Proximal.SAMPLER:
        log_ratio = token.new - token.sampler
    gain, slopes[index] = clipped_gain(objective, log_ratio, row.advantage)
    return gain, slopes


def kl_of(estimator: KlEstimator, token: Token) -> tuple[float, float]:
    """The estimate, and its derivative by the log-probability."""
    d = token.reference - token.new
    if estimator is KlEstimator.K1:
        return -d, 1.0
    if estimator is KlEstimator.K2:
        return d * d / 2, -d
    return math.exp(bound(d)) - 1 - d, (-math.exp(d) if -20.0 <= d <= 20.0 else 0.0) + 1.0


@dataclass
class Answer:
    """Loss, its gradients by log-probabilities and entropies, and the size of its summands."""

    loss: float
    by_logprob: list[float]
    by_entropy: list[float]
    scale: float


def reference(case: Case, rows: Sequence[Row], anchors: Sequence[Row] | None = None) -> Answer:
    """The loss of a minibatch in loops. With `anchors`, what stands under a stop-gradient is taken from them."""
    shared, objective = case.shared, case.objective
    summands: list[float] = []
    by_logprob: list[list[float]] = [[0.0] * len(row.tokens) for row in rows]
    by_entropy: list[float] = []
    bonus = BONUS if shared.entropy.coefficient or shared.entropy.target else 0.0
    positive = 0
    for row in rows:
        if row.accepted:
            positive += len(row.tokens)
    for number, row in enumerate(rows):
        share = share_of(case, rows, row)
        for index, token in enumerate(row.tokens):
            weight = weight_of(shared.correction, row, token)
            gain, slopes = gain_of(case, row, index, (anchors or rows)[number])
            summands.append(-share * weight * gain)
            for other, slope in enumerate(slopes):
                by_logprob[number][other] -= share * weight * slope
            summands.append(-share * bonus * token.entropy)
            by_entropy.append(-share * bonus)
            if shared.reference_kl.coefficient:
                penalty, slope = kl_of(shared.reference_kl.estimator, token)
                summands.append(share * shared.reference_kl.coefficient * penalty)
                by_logprob[number][index] += share * shared.reference_kl.coefficient * slope
            if isinstance(objective, Gppo) and row.accepted:
                summands.append(-objective.positive_nll * token.new / positive)
                by_logprob[number][index] -= objective.positive_nll / positive
    flat = [slope for slopes in by_logprob for slope in slopes]
    return Answer(math.fsum(summands), flat, by_entropy, math.fsum(map(abs, summands)))


# ---- the objective, on the same rows ----


def counts_of(rows: Sequence[Row]) -> MinibatchCounts:
    return MinibatchCounts(
        num_tokens=sum(len(row.tokens) for row in rows),
        num_rollouts=len(rows),
        num_accepted_tokens=sum(len(row.tokens) for row in rows if row.accepted),
    )


def computed(case: Case, rows: Sequence[Row], counts: MinibatchCounts | None = None) -> Answer:
    flat = [(number, row, token) for number, row in enumerate(rows) for token in row.tokens]

    def column(values: list[float], *, grad: bool = False) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, requires_grad=grad)

    inputs = LossInputs(
        logprobs=column([token.new for _, _, token in flat], grad=True),
        old_logprobs=column([token.old for _, _, token in flat]),
        sampler_logprobs=column([token.sampler for _, _, token in flat]),
        advantages=column([row.advantage for _, row, _ in flat]),
        rollout_of_token=torch.tensor([number for number, _, _ in flat]),
        entropies=column([token.entropy for _, _, token in flat], grad=True),
        accepted=torch.tensor([row.accepted for _, row, _ in flat]),
        reference_logprobs=column([token.reference for _, _, token in flat]),
        entropy_coefficient=BONUS,
    )
    objective = SurrogateLoss(case.objective, case.shared)
    terms = objective(inputs, counts or counts_of(rows))
    for diagnostic in terms.diagnostics.values():
        assert diagnostic.values.shape == inputs.logprobs.shape
        assert not diagnostic.values.requires_grad
    by_logprob, by_entropy = torch.autograd.grad(
        terms.loss, [inputs.logprobs, inputs.entropies], allow_unused=True, materialize_grads=True
    )
    return Answer(float(terms.loss.detach()), by_logprob.tolist(), by_entropy.tolist(), 0.0)


def of(objective: ObjectiveSection, **shared: Any) -> Case:
    return Case(objective, SharedTerms(**shared))


def corrected(kind: CorrectionKind, cap: float = 2.0, floor: float = 0.0) -> CorrectionSection:
    return CorrectionSection(kind=kind, cap=cap, floor=floor)


def penalised(estimator: KlEstimator) -> ReferenceKlSection:
    return ReferenceKlSection(coefficient=0.04, estimator=estimator)


NONE = corrected(CorrectionKind.NONE)
CASES: dict[str, Case] = {
    **{name: of(section) for name, section in PUBLISHED.items()},
    "dapo, dual clip": of(Dapo(dual_clip=3.0)),
    "grpo, fixed divisor": of(Grpo(aggregation=Aggregation.FIXED_DIVISOR, divisor_tokens=7)),
    "gspo, wide clip": of(Gspo(clip_low=0.3, clip_high=0.4)),
    "gspo+, wide clip": of(Gspo(clip_low=0.3, clip_high=0.4, aggregation=Aggregation.TOKEN_MEAN)),
    "gppo, later advice": of(Gppo(beta_low=0.25, beta_high=0.5)),
    "gppo, no nll": of(Gppo(positive_nll=0.0)),
    "gppo, dual clip": of(Gppo(dual_clip=1.5), correction=NONE),
    "cispo, lower bound": of(Cispo(clip_low=0.2)),
    "ppo, decoupled": of(Ppo(), correction=corrected(CorrectionKind.TOKEN)),
    "ppo, coupled": of(Ppo(proximal=Proximal.SAMPLER), correction=NONE),
    "ppo, dual clip": of(Ppo(dual_clip=3.0), correction=corrected(CorrectionKind.TOKEN_TRUNCATED, 5.0)),
    "sequence TIS": of(Dapo(), correction=corrected(CorrectionKind.SEQUENCE_TRUNCATED)),
    "geometric TIS": of(Gspo(), correction=corrected(CorrectionKind.GEOMETRIC_TRUNCATED, 1.05)),
    "icepop": of(Dapo(), correction=corrected(CorrectionKind.TOKEN_MASKED, 5.0, 0.5)),
    "sequence MIS": of(Dapo(), correction=corrected(CorrectionKind.SEQUENCE_MASKED)),
    **{f"kl {k}": of(Grpo(), reference_kl=penalised(k)) for k in KlEstimator},
    "entropy bonus": of(Dapo(), entropy=EntropySection(coefficient=0.1)),
    "distillation": of(Distillation(teacher="t"), correction=NONE),
    "distillation, corrected": of(Distillation(teacher="t", aggregation=Aggregation.SEQUENCE_MEAN)),
    "distillation and rewards": of(Distillation(teacher="t", reward_weight=0.7), correction=NONE),
    "everything": of(
        Gspo(clip_low=0.3, clip_high=0.4),
        correction=corrected(CorrectionKind.SEQUENCE_TRUNCATED, 3.0),
        reference_kl=penalised(KlEstimator.K3),
        entropy=EntropySection(target=0.2),
    ),
}


def check(case: Case, rows: Sequence[Row]) -> None:
    expected, found = reference(case, rows), computed(case, rows)
    assert found.loss == pytest.approx(expected.loss, rel=1e-9, abs=1e-9 * expected.scale + 1e-15)
    largest = max(1e-6, *map(abs, expected.by_logprob))
    assert found.by_logprob == pytest.approx(expected.by_logprob, rel=1e-9, abs=1e-9 * largest)
    assert found.by_entropy == pytest.approx(expected.by_entropy, rel=1e-9, abs=1e-15)


def random_rows(seed: int, sizes: Sequence[int] = (5, 1, 3, 4), spread: float = 0.6) -> list[Row]:
    """Rollouts whose policies differ by about `spread` in log-probability."""
    source = random.Random(seed)

    def token() -> Token:
        new = -source.expovariate(0.7) - 0.01
        near = [min(0.0, new + source.gauss(0, spread)) for _ in range(3)]
        return Token(new, near[0], near[1], near[2], source.random() * 2)

    return [Row(tuple(token() for _ in range(n)), source.gauss(0, 1), source.random() < 0.5) for n in sizes]


logprobs = st.floats(-8.0, 0.0)
some_rows = st.lists(
    st.builds(
        Row,
        st.lists(st.builds(Token, logprobs, logprobs, logprobs, logprobs, st.floats(0, 5)), min_size=1, max_size=5).map(
            tuple
        ),
        st.one_of(st.just(0.0), st.floats(-3.0, 3.0)),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)

EDGES: dict[str, list[Row]] = {
    "one token": [Row((Token(-1.0, -1.1, -1.2, -0.9, 0.5),), 1.0, True)],
    "on-policy": [Row((Token(-1.0, -1.0, -1.0, -1.0, 0.5),) * 3, a, a > 0) for a in (1.0, -1.0)],
    "advantages of zero": [Row((Token(-1.0, -2.0, -3.0, -0.5, 0.5),) * 2, 0.0, accepted) for accepted in (True, False)],
    "nobody is right": random_rows(1)[:1] + [replace(row, accepted=False) for row in random_rows(2)],
    "everybody is right": [replace(row, accepted=True) for row in random_rows(3)],
    "certain tokens": [Row((Token(0.0, 0.0, 0.0, 0.0, 0.0),) * 2, a, False) for a in (2.0, -2.0)],
    "far apart": [
        Row((Token(-1.0, -50.0, -90.0, -40.0, 1.0), Token(-50.0, -1.0, -40.0, -99.0, 1.0)), a, a > 0)
        for a in (1.5, -1.5)
    ],
    "lengths 1 and 200": random_rows(4, (200, 1)),
}


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=40)
@given(rows=some_rows)
def test_loss_and_gradient_are_those_of_the_reference_on_random_batches(name: str, rows: list[Row]) -> None:
    check(CASES[name], rows)


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_the_reference_on_edge_batches(name: str, edge: str) -> None:
    check(CASES[name], EDGES[edge])


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_finite_differences(name: str) -> None:
    """Central differences of the reference's loss, with everything under a stop-gradient held fixed."""
    case, rows, step = CASES[name], random_rows(7), 1e-6
    found = computed(case, rows).by_logprob
    slopes = []
    for number, row in enumerate(rows):
        for index, token in enumerate(row.tokens):
            losses = []
            for sign in (1, -1):
                moved = list(row.tokens)
                moved[index] = replace(token, new=token.new + sign * step)
                changed = [*rows[:number], replace(row, tokens=tuple(moved)), *rows[number + 1 :]]
                losses.append(reference(case, changed, rows).loss)
            slopes.append((losses[0] - losses[1]) / (2 * step))
    assert any(slopes)
    assert found == pytest.approx(slopes, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=15)
@given(rows=some_rows, cut=st.integers(0, 4))
def test_micro_batches_of_whole_rollouts_add_up(name: str, rows: list[Row], cut: int) -> None:
    case, counts = CASES[name], counts_of(rows)
    whole = computed(case, rows, counts)
    parts = [computed(case, part, counts) for part in (rows[:cut], rows[cut:]) if part]
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss, rel=1e-9, abs=1e-9)
    assert [slope for part in parts for slope in part.by_logprob] == pytest.approx(
        whole.by_logprob, rel=1e-9, abs=1e-12
    )


# ---- identities of the papers ----


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    dot = math.fsum(a * b for a, b in zip(one, other, strict=True))
    return dot / math.sqrt(math.fsum(a * a for a in one) * math.fsum(b * b for b in other))


def on_policy(rows: Sequence[Row]) -> list[Row]:
    return [
        replace(row, tokens=tuple(replace(t, old=t.new, sampler=t.new, reference=t.new) for t in row.tokens))
        for row in rows
    ]


def test_the_first_on_policy_step_has_one_direction_at_equal_lengths() -> None:
    """pi_theta = pi_old = pi_sampler: every objective is REINFORCE, up to a factor."""
    rows = on_policy(random_rows(11, (4, 4, 4)))
    gradients = [computed(of(replace_nll(section)), rows).by_logprob for section in PUBLISHED.values()]
    plain = [-row.advantage for row in rows for _ in row.tokens]
    assert [cosine(gradient, plain) for gradient in gradients] == pytest.approx([1.0] * len(PUBLISHED), abs=1e-12)


def test_the_first_on_policy_step_depends_only_on_the_aggregation() -> None:
    rows = on_policy(random_rows(12, (5, 1, 3)))
    for aggregation in (Aggregation.TOKEN_MEAN, Aggregation.SEQUENCE_MEAN):
        gradients = [
            computed(of(replace_nll(section).model_copy(update={"aggregation": aggregation})), rows).by_logprob
            for section in PUBLISHED.values()
        ]
        for gradient in gradients[1:]:
            assert gradient == pytest.approx(gradients[0], rel=1e-12)


def replace_nll(section: ObjectiveSection) -> ObjectiveSection:
    return section.model_copy(update={"positive_nll": 0.0}) if isinstance(section, Gppo) else section


@settings(max_examples=40)
@given(some_rows)
def test_gppo_inside_the_clip_range_has_the_plain_ratio_gradient(rows: list[Row]) -> None:
    inside = [
        replace(row, tokens=tuple(replace(t, old=t.new + 0.2 * math.tanh(t.old + 4)) for t in row.tokens))
        for row in rows
    ]
    found = computed(of(Gppo(positive_nll=0.0), correction=NONE), inside).by_logprob
    count = sum(len(row.tokens) for row in rows)
    plain = [-math.exp(t.new - t.old) * row.advantage / count for row in inside for t in row.tokens]
    assert all(0.8 <= math.exp(t.new - t.old) <= 1.28 for row in inside for t in row.tokens)
    assert found == pytest.approx(plain, rel=1e-9, abs=1e-15)


def test_gppo_keeps_a_bounded_gradient_where_ppo_has_none() -> None:
    rows = [
        Row((Token(-1.0, -2.0, -2.0, -1.0, 0.0),), 1.0, False),
        Row((Token(-2.0, -1.0, -1.0, -1.0, 0.0),), -1.0, False),
    ]
    gppo = computed(of(Gppo(beta_low=0.25, beta_high=0.5), correction=NONE), rows).by_logprob
    assert gppo == pytest.approx([-0.5 * 1.28 / 2, 0.25 * 0.8 / 2], rel=1e-12)
    assert computed(of(Dapo(), correction=NONE), rows).by_logprob == [0.0, 0.0]


def test_the_dual_clip_of_gppo_ends_the_gradient_of_a_negative_token_far_above_its_old_probability() -> None:
    """As compute_gppo_loss_general_beta of KlearReasoner's core_algos.py: where A < 0, the loss is min(-c A, -r A)."""
    negative = [Row((Token(-1.0, -4.0, -4.0, -1.0, 0.0),), -1.0, False)]  # the ratio is exp(3), about 20
    case = of(Gppo(dual_clip=10.0), correction=NONE)
    assert (computed(case, negative).loss, computed(case, negative).by_logprob) == (10.0, [0.0])
    free = computed(of(Gppo(), correction=NONE), negative)
    assert [free.loss, *free.by_logprob] == pytest.approx([math.exp(3)] * 2)
    positive = [replace(negative[0], advantage=1.0)]
    assert computed(case, positive) == computed(of(Gppo(), correction=NONE), positive)


@settings(max_examples=40)
@given(some_rows, st.integers(1, 5))
def test_gspo_plus_equals_gspo_at_equal_lengths_only(rows: list[Row], size: int) -> None:
    equal = [replace(row, tokens=(row.tokens * size)[:size]) for row in rows]
    plain, plus = (of(PUBLISHED[name], correction=NONE) for name in ("gspo", "gspo+"))
    one, other = computed(plain, equal), computed(plus, equal)
    assert one.loss == pytest.approx(other.loss, rel=1e-9, abs=1e-12)
    assert one.by_logprob == pytest.approx(other.by_logprob, rel=1e-9, abs=1e-12)
    unequal = random_rows(5, (6, 2), spread=1e-5)
    assert cosine(computed(plain, unequal).by_logprob, computed(plus, unequal).by_logprob) < 0.99


def test_gspo_has_one_clip_decision_for_each_rollout() -> None:
    up = Row(tuple(Token(-1.0, -1.0 - d, -1.0, -1.0, 0.0) for d in (0.5, -0.1)), 1.0, False)
    assert computed(of(PUBLISHED["gspo"]), [up]).by_logprob == [0.0, 0.0], "the mean ratio is above 1 + 4e-4"
    wide = computed(of(Gspo(clip_low=0.3, clip_high=0.4)), [up]).by_logprob
    assert wide[0] == wide[1] != 0.0


@settings(max_examples=40)
@given(some_rows)
def test_relations_between_objectives(rows: list[Row]) -> None:
    def same(one: Case, other: Case, of_rows: list[Row]) -> None:
        a, b = computed(one, of_rows), computed(other, of_rows)
        assert (a.loss, a.by_logprob) == (b.loss, b.by_logprob)

    same(of(Dapo()), of(PUBLISHED["grpo+"]), rows)
    same(of(Grpo()), of(ReinforcePlusPlus()), rows)
    same(of(Dapo()), of(Dapo(dual_clip=1e9)), rows)
    together = [replace(row, tokens=tuple(replace(t, old=t.sampler) for t in row.tokens)) for row in rows]
    decoupled = of(Ppo(), correction=corrected(CorrectionKind.TOKEN))
    same(decoupled, of(Ppo(proximal=Proximal.SAMPLER), correction=NONE), together)
    for kind in set(CorrectionKind) - {CorrectionKind.ENTRY_POINT}:
        same(of(Dapo(), correction=corrected(kind)), of(Dapo(), correction=NONE), together)


@settings(max_examples=40)
@given(some_rows)
def test_the_first_step_of_a_batch_with_token_weights_is_importance_sampling_without_a_clip(rows: list[Row]) -> None:
    """Tinker's importance_sampling is the sum over tokens of -pi / pi_sampler * A; one step a batch has pi = pi_old."""
    first = [replace(row, tokens=tuple(replace(t, old=t.new) for t in row.tokens)) for row in rows]
    whole = Dapo(aggregation=Aggregation.FIXED_DIVISOR, divisor_tokens=1)
    found = computed(of(whole, correction=corrected(CorrectionKind.TOKEN)), first)
    terms = [-math.exp(bound(t.new - t.sampler)) * row.advantage for row in first for t in row.tokens]
    assert found.loss * len(first) == pytest.approx(math.fsum(terms), rel=1e-9, abs=1e-9)
    assert [slope * len(first) for slope in found.by_logprob] == pytest.approx(terms, rel=1e-9, abs=1e-12)


def test_a_policy_that_is_its_reference_has_no_kl_and_no_pull_from_k2_and_k3() -> None:
    rows = [replace(row, advantage=0.0) for row in on_policy(random_rows(3))]
    for estimator in KlEstimator:
        answer = computed(of(Dapo(), reference_kl=penalised(estimator)), rows)
        assert answer.loss == 0.0
        assert any(answer.by_logprob) is (estimator is KlEstimator.K1)


def test_the_expected_gradient_of_distillation_is_that_of_the_reverse_kl() -> None:
    """Over all tokens of a vocabulary, weighted by the policy: by each logit, p_i (log p_i - log q_i - KL)."""
    source = random.Random(8)
    policy, teacher = (torch.tensor([source.gauss(0, 1) for _ in range(7)], dtype=torch.float64) for _ in range(2))
    p, q = (logits.log_softmax(0) for logits in (policy, teacher))
    rows = [Row((Token(float(p[i]), float(p[i]), float(p[i]), float(q[i]), 0.0),), 0.0, False) for i in range(7)]
    case = of(Distillation(teacher="t"), correction=NONE)
    by_logprob = torch.tensor([computed(case, [row]).by_logprob[0] for row in rows], dtype=torch.float64)
    weights = p.exp() * by_logprob
    found = [float(sum(weights[i] * (float(i == j) - p[j].exp()) for i in range(7))) for j in range(7)]
    kl = float((p.exp() * (p - q)).sum())
    assert found == pytest.approx([float(p[j].exp() * (p[j] - q[j] - kl)) for j in range(7)], rel=1e-9, abs=1e-12)


def test_distillation_without_a_teacher_is_refused() -> None:
    tokens = torch.zeros(2, dtype=torch.float64)
    inputs = LossInputs(tokens, tokens, tokens, tokens, torch.zeros(2).long(), tokens, torch.ones(2).bool())
    with pytest.raises(ValueError, match="log-probabilities of the teacher"):
        SurrogateLoss(Distillation(teacher="t"))(inputs, MinibatchCounts(2, 1, 0))
    with pytest.raises(ValueError, match="the teacher of distillation is the reference policy"):
        LearnerSection(objective=Distillation(teacher="t"), reference_kl=ReferenceKlSection(coefficient=0.1))


# ---- registry ----


def test_every_objective_of_the_configuration_is_in_the_registry_and_published() -> None:
    definitions = LearnerSection.model_json_schema()["$defs"]
    allowed = {name for name, schema in definitions.items() if "name" in schema.get("properties", {})}
    assert {section.__name__ for section in OBJECTIVES} == allowed - {EntryPointObjective.__name__}
    assert {type(section) for section in PUBLISHED.values()} == set(OBJECTIVES) - {Distillation}, "it needs a teacher"
    assert {type(case.objective) for case in CASES.values()} == set(OBJECTIVES)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_configured_objective_has_its_settings_and_the_shared_ones(name: str) -> None:
    correction = corrected(CorrectionKind.SEQUENCE_MASKED, 3.0)
    section = LearnerSection.model_validate(
        {"objective": PUBLISHED[name].model_dump(mode="json"), "correction": correction.model_dump(mode="json")}
    )
    shared = SharedTerms(section.correction)
    assert objective_of(section.objective, shared) == SurrogateLoss(PUBLISHED[name], SharedTerms(correction))


def test_defaults_are_the_published_values() -> None:
    dapo, gspo, gppo = Dapo(), Gspo(), Gppo()
    assert LearnerSection().objective == dapo
    assert (dapo.clip_low, dapo.clip_high, dapo.aggregation) == (0.2, 0.28, Aggregation.TOKEN_MEAN)
    assert (gspo.clip_low, gspo.clip_high, gspo.aggregation) == (3e-4, 4e-4, Aggregation.SEQUENCE_MEAN)
    assert (gppo.clip_low, gppo.clip_high, gppo.beta_low, gppo.beta_high, gppo.positive_nll) == (0.2, 0.28, 1, 1, 0.1)
    shared = LearnerSection()
    assert shared.correction == CorrectionSection(kind=CorrectionKind.TOKEN_TRUNCATED, cap=2.0)
    assert shared.reference_kl.coefficient == shared.entropy.coefficient == shared.entropy.target == 0
