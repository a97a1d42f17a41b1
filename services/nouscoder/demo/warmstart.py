"""The warm start before reinforcement learning: supervised fine-tuning (sft/training.py) on demonstrations.

There are three stages: excerpts of right demonstrations whose width grows, whole right demonstrations, and noisy ones,
which set the error rate of the finished policy. A share of the whole ones may be proposals of the problem, with the
same noise in their program: they let the demo's policy begin a self-play (docs/self-play.md). Only program tokens and
the eos are in the loss.

With probability NOISE_PROBABILITY a noisy demonstration contains one mistake, else it is right. Most mistakes are of
kinds that all families share: a misspelt name, a dropped parenthesis, a missing int(), a result that is one too large,
a wrong variable. A policy that unlearns them on some problems therefore improves on all. The other mistakes are a wrong
operator and the family's own wrong programs.

A small policy learns the form of the programs in seconds, but takes long to learn that it must copy a parameter from
the statement, because it must attend to one character of about forty. An excerpt has few characters around the
parameter, so the policy learns to copy there first and then in wider excerpts.

Muon (learner/optimizer.py) trains the matrices, because the policy then learns to copy in a third of the steps that
AdamW takes. AdamW trains the embedding and the norms.
"""

from __future__ import annotations

import re
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
from nouscoder.demo.families import Parameters
from nouscoder.demo.policy import EOS_ID, CharTokenizer, PolicySize, build_policy, save_policy
from nouscoder.demo.problems import FAMILY_BY_NAME, DemoProblem, prompt_of
from nouscoder.domain.rollout import Rollout
from nouscoder.learner.state.line_file import Line
from nouscoder.self_play.judgement import proposal_text
from nouscoder.sft.reading import demonstration
from nouscoder.sft.training import SupervisedTraining

# Noisy demonstrations.

NOISE_PROBABILITY = 0.66
_OWN_SHARE = 0.15  # of the mistakes; the rest are of the shared kinds

_MISSPELT = {"input": "imput", "print": "pritn", "split": "splt", "sorted": "sortd", "range": "rnage", "count": "cuont"}
_OPERATORS = (("+", "-"), ("*", "+"), ("//", "%"), ("%", "*"), (">", "<"), ("<", ">"), ("==", "!="))

Mistake = Callable[[DemoProblem, Random], str | None]


def demonstrate(problem: DemoProblem, random: Random, *, noise: float = NOISE_PROBABILITY) -> str:
    """The right program, or with probability `noise` the program with one mistake in it."""
    if random.random() >= noise:
        return problem.program
    shared, own = (
        [text for mistake in kind if (text := mistake(problem, random)) is not None]
        for kind in (SHARED_MISTAKES, OWN_MISTAKES)
    )
    return random.choice(own if random.random() < _OWN_SHARE else shared)


def _misspelt_name(problem: DemoProblem, random: Random) -> str | None:
    names = [name for name in _MISSPELT if name in problem.program]
    name = random.choice(names)
    return problem.program.replace(name, _MISSPELT[name], 1)


def _dropped_parenthesis(problem: DemoProblem, random: Random) -> str | None:
    head, closing, tail = problem.program.rpartition(")")
    return head + tail if closing else None


def _forgotten_conversion(problem: DemoProblem, random: Random) -> str | None:
    for conversion, raw in (("int(input())", "input()"), ("list(map(int,input().split()))", "input().split()"),
                            ("map(int,input().split())", "input().split()")):  # fmt: skip
        if conversion in problem.program:
            return problem.program.replace(conversion, raw)
    return None


def _one_too_many(problem: DemoProblem, random: Random) -> str | None:
    return problem.program[:-1] + "+1)" if problem.program.endswith(")") else None


def _wrong_variable(problem: DemoProblem, random: Random) -> str | None:
    head, call, tail = problem.program.rpartition("print(")
    return f"{head}{call}z{tail[1:]}" if tail[0].isalpha() and not tail[1].isalpha() else None


def _wrong_operator(problem: DemoProblem, random: Random) -> str | None:
    head, newline, body = problem.program.partition("\n")
    for right, wrong in _OPERATORS:
        if right in body:
            return head + newline + body.replace(right, wrong, 1)
    return None


def _wrong_variant(problem: DemoProblem, random: Random) -> str | None:
    return random.choice(problem.wrong_programs)


SHARED_MISTAKES: tuple[Mistake, ...] = (
    _misspelt_name,
    _dropped_parenthesis,
    _forgotten_conversion,
    _one_too_many,
    _wrong_variable,
)
OWN_MISTAKES: tuple[Mistake, ...] = (_wrong_operator, _wrong_variant)


# Proposals.


PROPOSING_PROMPT = "Propose a problem.\n"  # self_play.prompt of configs/demo-self-play.toml
MOST_CHARS = 280
_NUM_INPUTS = 5


def can_be_proposed(problem: DemoProblem) -> bool:
    """Whether a proposal of the problem is short. Problems about the 40th number of a list need longer inputs."""
    return len(proposal_text(problem.statement, problem.program, _short_inputs(problem))) <= MOST_CHARS


def proposed(problem: DemoProblem, random: Random, *, noise: float) -> str:
    """A proposal of the problem. With probability `noise` its program has a mistake."""
    inputs = _short_inputs(problem)
    random.shuffle(inputs)
    return proposal_text(problem.statement, demonstrate(problem, random, noise=noise), inputs)


def _short_inputs(problem: DemoProblem) -> list[str]:
    return sorted((case.input for case in problem.tests), key=len)[:_NUM_INPUTS]


# Excerpts of right demonstrations.

_PLACE = re.compile(r"\{([abc])\}")


def excerpt(problem: DemoProblem, width: int, random: Random) -> tuple[str, str, bool]:
    """A cut of the prompt and one of the program, both around the same parameter.

    Each end is at a random distance of at most `width` characters from the parameter. Returns (prompt cut, program cut,
    whether the program cut reaches the program's end).
    """
    family, prompt = FAMILY_BY_NAME[problem.family], prompt_of(problem)
    name, start, stop = random.choice(places(family.program, problem.parameters))
    asked_start, asked_stop = next(
        (begin, end) for other, begin, end in places(family.statement, problem.parameters) if other == name
    )
    prompt_cut = prompt[max(0, asked_start - random.randint(0, width)) : asked_stop + random.randint(0, width)]
    end = stop + random.randint(0, width)
    program_cut = problem.program[max(0, start - random.randint(0, width)) : end]
    return prompt_cut.rstrip("\n") + "\n", program_cut, end >= len(problem.program)


def places(template: str, parameters: Parameters) -> list[tuple[str, int, int]]:
    """The position of each parameter in the filled template: (name, start, stop) in characters."""
    values = dict(zip("abc", map(str, parameters), strict=False))
    found: list[tuple[str, int, int]] = []
    shift = 0
    for match in _PLACE.finditer(template):
        start, value = match.start() + shift, values[match[1]]
        found.append((match[1], start, start + len(value)))
        shift += len(value) - len(match[0])
    return found


# The training.

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
