"""On-policy distillation: a student comes nearer to its teacher, and a teacher with other tokens is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.functional import log_softmax
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from nouscoder.config import Config, LearnerSection, RunSection, load_config
from nouscoder.config.run import PolicySection
from nouscoder.domain.batch import Batch, GradedRollout
from nouscoder.domain.rollout import Sampling, Task, assemble_rollout
from nouscoder.domain.tokens import Completion, FinishReason, VersionSpan, float32, int32
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.errors import Unusable
from nouscoder.learner.loading import trainer_at
from nouscoder.learner.model.packed_attention import PACKED_ATTENTION
from nouscoder.learner.model.synthetic import random_batch, random_policy, write_policy_folder
from nouscoder.learner.trainer import Trainer
from nouscoder.objectives.correction import CorrectionKind, CorrectionSection
from nouscoder.objectives.distillation import Distillation
from nouscoder.run.asked_of_models import token_faults

NUM_ROLLOUTS, PROMPT, ANSWER = 64, 4, 8
VOCABULARY = 12  # so few that each batch has many samples of each token
REJECTED = Verdict(VerdictKind.WRONG_ANSWER, 0, 1, 1, 0.0, "none")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small_policy(seed: int, scale: float) -> Qwen3ForCausalLM:
    """A policy of few tokens; the larger `scale`, the farther from uniform."""
    config = copy.deepcopy(random_policy(0).config)
    config.vocab_size = VOCABULARY
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Qwen3ForCausalLM(config)
    policy.set_attn_implementation(PACKED_ATTENTION)
    with torch.no_grad():
        policy.lm_head.weight.mul_(scale)
    return policy


def peaked_policy(seed: int) -> Qwen3ForCausalLM:
    """A policy with the tokens of CharTokenizer that is far from uniform."""
    policy = random_policy(seed)
    with torch.no_grad():
        policy.lm_head.weight.mul_(20.0)
    return policy


def plain(policy: PreTrainedModel) -> Qwen3ForCausalLM:
    """The same policy with transformers' own attention."""
    config = copy.deepcopy(policy.config)
    assert isinstance(config, Qwen3Config)
    same = Qwen3ForCausalLM(config)
    same.load_state_dict(policy.state_dict())
    same.set_attn_implementation("eager")
    same.eval()  # type: ignore[no-untyped-call]
    return same


@torch.no_grad()
def sampled(policy: Qwen3ForCausalLM, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [rollouts, PROMPT + ANSWER] of the policy, and the log-probabilities [rollouts, ANSWER]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (NUM_ROLLOUTS, PROMPT), generator=generator)
    logprobs = []
    for _ in range(ANSWER):
        scores = log_softmax(policy(tokens).logits[:, -1], dim=-1)
        chosen = torch.multinomial(scores.exp(), 1, generator=generator)
        logprobs.append(scores.gather(1, chosen))
        tokens = torch.cat([tokens, chosen], dim=1)
    return tokens, torch.cat(logprobs, dim=1)


def batch_of(policy: Qwen3ForCausalLM, batch_id: int) -> Batch:
    """A batch that the policy samples. Every verdict is wrong_answer: only the teacher tells tokens apart."""
    tokens, logprobs = sampled(policy, batch_id)
    graded = []
    for row in range(NUM_ROLLOUTS):
        answer = Completion(
            int32(tokens[row, PROMPT:].tolist()),
            float32(logprobs[row].tolist()),
            (VersionSpan(batch_id, ANSWER),),
            FinishReason.STOP,
        )
        task = Task(f"{batch_id}-{row}", f"{batch_id}-{row // 4}", "p", "", Sampling())
        rollout = assemble_rollout(task, [int32(tokens[row, :PROMPT].tolist()), answer], "")
        graded.append(GradedRollout(rollout, REJECTED, -1.0))
    return Batch(batch_id, tuple(graded), batch_id)


@torch.no_grad()
def reverse_kl(student: Qwen3ForCausalLM, teacher: Qwen3ForCausalLM) -> float:
    """KL(student || teacher) of the next token, over the whole vocabulary, mean over the student's own answers."""
    tokens, _ = sampled(student, seed=999)
    ours, theirs = (log_softmax(one(tokens).logits[:, PROMPT - 1 : -1], dim=-1) for one in (student, teacher))
    return float((ours.exp() * (ours - theirs)).sum(-1).mean())


def test_a_student_comes_nearer_to_its_teacher() -> None:
    teacher = small_policy(1, scale=12.0)
    settings = LearnerSection(
        steps_per_batch=1,
        learning_rate=1e-2,
        objective=Distillation(teacher="teacher"),
        correction=CorrectionSection(kind=CorrectionKind.NONE),
    )
    trainer = Trainer(small_policy(0, scale=1.0), Config(learner=settings), lambda _: teacher)
    before = reverse_kl(plain(trainer.model), plain(teacher))
    told = []
    for batch_id in range(20):
        (step,) = trainer.train_batch(batch_of(plain(trainer.model), batch_id)).steps
        told.append(step.diagnostics["reverse_kl"])
    after = reverse_kl(plain(trainer.model), plain(teacher))
    assert after < 0.4 * before
    assert told[0] == pytest.approx(before, rel=0.25), "the diagnostic estimates the divergence"
    assert sum(told[-5:]) / 5 == pytest.approx(after, rel=0.5)


def config_of(root: Path, teacher: Path) -> Config:
    objective = Distillation(teacher=str(teacher))
    return Config(
        run=RunSection(root=root),
        policy=PolicySection(path=root / "policy"),
        learner=LearnerSection(steps_per_batch=1, objective=objective),
    )


def test_the_learner_loads_the_teacher_of_the_configuration(tmp_path: Path) -> None:
    """A policy that is its own teacher has a reverse KL of 0; another teacher has not."""
    write_policy_folder(tmp_path / "policy", random_policy(0))
    write_policy_folder(tmp_path / "teacher", peaked_policy(1))
    batch = random_batch(0, seed=1)
    (own,) = trainer_at(config_of(tmp_path, tmp_path / "policy"), None).train_batch(batch).steps
    (other,) = trainer_at(config_of(tmp_path, tmp_path / "teacher"), None).train_batch(batch).steps
    assert own.diagnostics["reverse_kl"] == pytest.approx(0.0, abs=1e-5)
    assert abs(other.diagnostics["reverse_kl"]) > 0.1


def test_a_changed_teacher_is_loaded(tmp_path: Path) -> None:
    asked: list[str] = []

    def load(settings: LearnerSection) -> Qwen3ForCausalLM:
        asked.append(settings.teacher)
        return peaked_policy(len(asked))

    settings = LearnerSection(steps_per_batch=1, objective=Distillation(teacher="a"))
    trainer = Trainer(random_policy(0), Config(learner=settings), load)
    trainer.use(settings)
    trainer.use(settings.model_copy(update={"objective": Distillation(teacher="b")}))
    assert asked == ["a", "b"]


def test_a_teacher_with_other_tokens_is_refused(tmp_path: Path) -> None:
    write_policy_folder(tmp_path / "policy", random_policy(0))
    write_policy_folder(tmp_path / "teacher", random_policy(1))
    file = tmp_path / "teacher" / "tokenizer.json"
    text = file.read_text()
    changed = text.replace('"a": ', '"zz": ', 1) if '"a": ' in text else text.replace('"a":', '"zz":', 1)
    assert changed != text
    file.write_text(changed)
    with pytest.raises(Unusable, match=r"the teacher .* has other tokens than the policy, for example"):
        trainer_at(config_of(tmp_path, tmp_path / "teacher"), None)
    # The same before a run starts, and before the first stage of a plan.
    teaches = ["learner.objective.name=distillation", f"learner.objective.teacher={tmp_path}/teacher"]
    (said,) = token_faults(load_config(None, [f"policy.path={tmp_path}/policy", *teaches]))
    assert "has other tokens than the policy" in said
    assert token_faults(load_config(None, [f"policy.path={tmp_path}/teacher", *teaches])) == []
