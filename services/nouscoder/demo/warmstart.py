"""The warm start before reinforcement learning: supervised fine-tuning (sft/training.py) on demonstrations.

There are three stages: excerpts of right demonstrations whose width grows, whole right demonstrations, and noisy ones,
which set the error rate of the finished policy. A share of the whole ones may be proposals of the problem, with the
same noise in their program: they let the demo's policy begin a self-play (docs/self-play.md). Only program tokens and
the eos are in the loss.

A small policy learns the form of the programs in seconds, but takes long to learn that it must copy a parameter from
the statement, because it must attend to one character of about forty. An excerpt has few characters around the
parameter, so the policy learns to copy there first and then in wider excerpts.

Muon (learner/optimizer.py) trains the matrices, because the policy then learns to copy in a third of the steps that
AdamW takes. AdamW trains the embedding and the norms.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from nouscoder.atomic_files import whole_folder
from nouscoder.config import (
    Config,
    DecayKind,
    LearnerSection,
    OptimizerKind,
    PolicySection,
    RunSection,
    ScheduleSection,
)
from nouscoder.demo.demonstrations import (
    NOISE_PROBABILITY,
    PROPOSING_PROMPT,
    can_be_proposed,
    demonstrate,
    excerpt,
    proposed,
)
from nouscoder.demo.policy import EOS_ID, CharTokenizer, PolicySize, build_policy, save_policy
from nouscoder.demo.problems import DemoProblem, prompt_of
from nouscoder.domain.rollout import Rollout
from nouscoder.learner.state.line_file import Line
from nouscoder.sft.rollouts import demonstration
from nouscoder.sft.training import SupervisedTraining

_WIDEST = 60  # characters; wider than any statement or program
_CHECKPOINT_EVERY_STEPS = 100

# Called with the steps done, the total number of steps, and the loss in nats per program token.
OnProgress = Callable[[int, int, float], None]


@dataclass(frozen=True, slots=True)
class WarmStartBudget:
    """The settings of the warm start."""

    excerpt_steps: int = 230
    clean_steps: int = 90
    noisy_steps: int = 150
    excerpt_batch_size: int = 48
    batch_size: int = 32
    matrix_learning_rate: float = 0.02
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    final_share: float = 0.02
    noise_probability: float = NOISE_PROBABILITY
    proposal_share: float = 0.0
    positions: int = PolicySize().max_positions


def warm_start(
    to: Path,
    problems: Sequence[DemoProblem],
    *,
    seed: int,
    budget: WarmStartBudget,
    threads: int = 1,
    on_progress: OnProgress = lambda done, total, loss: None,
) -> None:
    """Write the folder `to` with a policy that was trained on demonstrations. It works in a folder beside it.

    A warm start that was interrupted goes on from its newest checkpoint. Raises TrainingError and StorageError.
    """
    work = to.with_name("warm-start")
    first = work / "first"
    if not first.exists():
        policy = build_policy(seed=seed)
        policy.config.max_position_embeddings = budget.positions
        with whole_folder(first) as part:
            save_policy(policy, part)
    batches = demonstration_batches(problems, seed=seed, budget=budget)
    teach_batches(first, to, batches, budget, work=work, seed=seed, threads=threads, on_progress=on_progress)
    shutil.rmtree(work)


def teach_batches(
    first: Path,
    to: Path,
    batches: Sequence[Sequence[Rollout]],
    budget: WarmStartBudget,
    *,
    work: Path,
    seed: int = 0,
    threads: int = 1,
    on_progress: OnProgress = lambda done, total, loss: None,
) -> None:
    """Train the policy in `first` on one batch a step and write it to `to`. `work` keeps checkpoints and the losses."""

    def report(line: Line) -> None:
        on_progress(line["step"], len(batches), line["loss"])

    config = _config(first, work, budget, len(batches), seed, threads)
    training = SupervisedTraining(config, batches, on_line=report)
    training.run()
    training.write_policy(to, card="")


def _config(first: Path, work: Path, budget: WarmStartBudget, num_steps: int, seed: int, threads: int) -> Config:
    schedule = ScheduleSection(
        warmup_steps=budget.warmup_steps,
        decay=DecayKind.COSINE,
        decay_steps=max(num_steps, budget.warmup_steps + 1),
        floor=budget.final_share,
    )
    learner = LearnerSection(
        optimizer=OptimizerKind.MUON,
        matrix_learning_rate=budget.matrix_learning_rate,
        learning_rate=budget.learning_rate,
        weight_decay=0.01,
        adam_betas=(0.9, 0.98),
        schedule=schedule,
        steps_per_batch=1,
        samples_per_batch=0,
        checkpoint_every_batches=_CHECKPOINT_EVERY_STEPS,
        threads=threads,
    )
    run = RunSection(root=work.parent, name=work.name, seed=seed)
    return Config(run=run, policy=PolicySection(path=first.resolve()), learner=learner)


def demonstration_batches(
    problems: Sequence[DemoProblem], *, seed: int, budget: WarmStartBudget
) -> list[list[Rollout]]:
    """The examples of each step."""
    random = Random(f"{seed}/demonstrations")
    return [*_excerpts(problems, budget, random), *_whole_programs(problems, budget, random)]


def _excerpts(problems: Sequence[DemoProblem], budget: WarmStartBudget, random: Random) -> Iterator[list[Rollout]]:
    """Excerpts. At least a third have text parameters, which are rarer and harder to copy than numbers."""
    texts = [problem for problem in problems if isinstance(problem.parameters[0], str)] or problems
    for step in range(budget.excerpt_steps):
        width = 1 + _WIDEST * step // budget.excerpt_steps
        batch = []
        for index in range(budget.excerpt_batch_size):
            problem = random.choice(texts if index % 3 == 0 else problems)
            prompt, program, ended = excerpt(problem, random.randint(0, width), random)
            batch.append(_example(prompt, program, ended=ended))
        yield batch


def _whole_programs(
    problems: Sequence[DemoProblem], budget: WarmStartBudget, random: Random
) -> Iterator[list[Rollout]]:
    for steps, noise in ((budget.clean_steps, 0.0), (budget.noisy_steps, budget.noise_probability)):
        for _ in range(steps):
            chosen = random.choices(problems, k=budget.batch_size)
            yield [_whole(problem, random, noise, budget.proposal_share) for problem in chosen]


def _whole(problem: DemoProblem, random: Random, noise: float, proposal_share: float) -> Rollout:
    if proposal_share and can_be_proposed(problem) and random.random() < proposal_share:
        return _example(PROPOSING_PROMPT, proposed(problem, random, noise=noise), ended=True)
    return _example(prompt_of(problem), demonstrate(problem, random, noise=noise), ended=True)


def _example(prompt: str, program: str, *, ended: bool) -> Rollout:
    tokenizer = CharTokenizer()
    answer = tokenizer.encode(program) + ([EOS_ID] if ended else [])
    return demonstration(tokenizer.encode_prompt(prompt), answer)
