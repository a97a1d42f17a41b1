"""The sections of the run as a whole: name, problems, first policy, evaluations; demo, plans, self-play, encryption."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from nouscoder.config.generation import GenerationSection
from nouscoder.domain.plan import StartFrom
from nouscoder.domain.submission import LANGUAGES, language_name
from nouscoder.sections import InputFile, Model, OutputFile, OutputPath, RunInput, Section


class SinkName(StrEnum):
    """A tool to which the lines of metrics.jsonl are copied; each is an extra of the package."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"


class GuardsSection(Section):
    """Warnings that the policy collapses or that rewards are hacked; 0 turns a guard off (domain/guards.py)."""

    entropy_floor: float = Field(0.01, ge=0, description="entropy_floor: mean entropy below this, in nats")
    repetition_share: float = Field(0.1, ge=0, le=1, description="repetition: share of rollouts that end in a loop")
    length_drift: float = Field(
        3.0,
        ge=0,
        description="length_drift: the mean length became this many times longer or shorter",
    )
    hard_coding_share: float = Field(
        0.05, ge=0, le=1, description="hard_coding: share of accepted programs that look as if they know the answers"
    )
    same_programs: float = Field(
        0.9, ge=0, le=1, description="same_programs: share of a group's programs that repeat another one of the group"
    )
    reward_hacking: float = Field(
        0.1,
        ge=0,
        le=1,
        description="reward_hacking: correlation of the reward model's scores with the verified rewards below this",
    )

    mismatch: float = Field(
        0.1,
        ge=0,
        description="mismatch: mean difference of the learner's and the sampler's log-probabilities of tokens that the"
        " same weights sampled, in nats, above this",
    )
    mismatch_stop: float = Field(0.5, ge=0, description="the run ends when that mean is above this; 0: it does not")

    def _faults(self) -> Iterator[str]:
        if 0 < self.length_drift <= 1:
            yield "length_drift must be above 1, or 0 for none"


class ReleaseSection(Section):
    """What `train` gives back on Kubernetes when the run is finished; the chart sets it (run/give_back.py)."""

    delete: tuple[str, ...] = Field(
        (), description="paths of objects in the Kubernetes API that are deleted, in this order; empty: none"
    )
    start: tuple[str, ...] = Field(
        (), description="paths of Deployments before that, of which the one that exists gets a pod that shows the run"
    )
    after_s: float = Field(3600.0, ge=0, description="seconds between the end of the run and that")
    gpus: int = Field(0, ge=0, description="GPUs of the objects, for messages")


class RunSection(Section):
    """Which run this is."""

    name: str = Field(
        "run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}(/[0-9]{2}-[A-Za-z0-9][A-Za-z0-9._-]{0,49})?$",
        description="name of the run, of its folder runs/NAME and of its keys in Redis: letters, digits, dots, _ and -,"
        " a letter or digit first; a stage of a plan is PLAN/NN-STAGE",
    )
    seed: int = Field(0, ge=0, description="seed of every random choice")
    root: OutputPath = Field(Path("runs"), description="folder that holds the run folders")
    total_batches: int = Field(
        30,
        ge=0,
        description="batches to train; the run has total_batches * learner.steps_per_batch steps; 0: only evaluate",
    )
    services: Literal["local", "external"] = Field(
        "local",
        description="local: train starts the four services as processes; external: train connects to running services",
    )
    max_filtered_batches: int = Field(
        50,
        ge=0,
        description="the run ends when this many batches of rollouts were filtered without a batch; 0: it does not",
    )
    peer_patience_s: float = Field(
        60.0, gt=0, description="seconds that a service waits for another service that does not answer"
    )
    max_restarts_per_hour: int = Field(
        10, ge=0, description="deaths of one process of a local run within an hour after which the run ends"
    )
    guards: GuardsSection = GuardsSection()
    sinks: tuple[SinkName, ...] = Field(
        (),
        description="tools that get the metrics: tensorboard, wandb, mlflow; docs/design/observability.md says where",
    )
    pages: str = Field(
        "", description="HTTP address for the run's live page and files, which all who reach it may read; empty: none"
    )
    pages_hosts: tuple[str, ...] = Field((), description="public host names of the pages")
    verifier_token_file: InputFile = Field(
        "",
        description="file with the token that evaluations and environments send to a verifier that has a tokens_file",
    )
    release: ReleaseSection = ReleaseSection()

    def _faults(self) -> Iterator[str]:
        if self.release.delete and self.services == "local":
            yield 'release.delete needs services = "external": a local run ends its processes by itself'
        if len(set(self.sinks)) != len(self.sinks):
            yield "sinks names one of them twice"

    @property
    def folder(self) -> Path:
        """The run folder, absolute."""
        return (self.root / self.name).resolve()


class ProblemsSection(Section):
    """Problem files: those to train on, and those held out for pass@1."""

    train: RunInput = Field(Path("problems/train.jsonl"), description="problems to train on")
    held_out: RunInput = Field(Path("problems/held_out.jsonl"), description="problems for pass@1 before and after")
    held_out_share: float = Field(
        0.0, ge=0, lt=1, description="share of `train` that is held out of training instead of the file `held_out`"
    )
    index: OutputFile = Field(
        "", description="folder of the index of `train`; empty: next to the file, if that can be written"
    )
    tests: OutputFile = Field(
        "", description="folder or URL (s3://...) of the tests, for broker and verifiers; empty: the broker sends them"
    )
    languages: tuple[str, ...] = Field(
        (),
        description="problems that allow another language are left out, such as one that the verifier lacks; empty:"
        " none is, and a local run sets it to the languages of this machine if that leaves problems out",
    )
    too_long_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="share of the problems that may be left out because their prompts leave no room for an answer in"
        " generation.max_tokens_total; with more a local run does not start",
    )

    @field_validator("languages")
    @classmethod
    def _known_languages(cls, languages: tuple[str, ...]) -> tuple[str, ...]:
        named = tuple(map(language_name, languages))
        if unknown := [name for name in named if name not in LANGUAGES]:
            raise ValueError(f"{unknown[0]!r} is none of {', '.join(sorted(LANGUAGES))}")
        return named


class PolicySection(Section):
    """The model to start from."""

    path: Model = Field(
        Path("policy"),
        description="Hugging Face folder (config.json, tokenizer, safetensors), or ORGANISATION/MODEL of a hub",
    )
    router_replay: bool = Field(
        False,
        description="of a policy with experts: generation (torch engine) records the experts of each token, and the"
        " learner uses the same ones (R3); a record grows by layers * top_k bytes a token",
    )


class DemoSection(Section):
    """What `nouscoder demo` and `nouscoder prepare-run` prepare; `nouscoder train` does not read it."""

    problems: Literal["programs", "functions"] = Field(
        "programs",
        description="programs: tiny programs, for a policy that is made and warm-started here; functions: Python"
        " functions asked for in a sentence, for SmolLM2-135M-Instruct, which is fetched (demo --real)",
    )
    train_problems: int = Field(1200, ge=1, description="problems to train on")
    held_out_problems: int = Field(180, ge=1, description="problems for pass@1 before and after")
    warm_start_share: float = Field(1.0, gt=0, description="factor on the number of steps of the supervised phase")
    proposal_share: float = Field(
        0.0, ge=0, le=1, description="share of the demonstrations that propose problems, for `nouscoder self-play`"
    )
    warm_start_threads: int = Field(2, ge=1, description="CPU threads of the supervised phase")


# Keys that belong to the plan as a whole.
NOT_IN_A_STAGE = ("plan", "run.name", "run.root", "run.services", "policy.path", "tls")


class YarnSection(Section):
    """YaRN rope scaling, written to config.json of the policy that the stage begins with."""

    factor: float = Field(0.0, ge=0, description="the context is factor * original_tokens; 0: as the policy has it")
    original_tokens: int = Field(0, ge=0, description="positions that the model was trained for before YaRN")

    def _faults(self) -> Iterator[str]:
        if bool(self.factor) != bool(self.original_tokens) or 0 < self.factor <= 1:
            yield "yarn needs a factor above 1 and original_tokens"

    @property
    def positions(self) -> int:
        """The number of positions with YaRN."""
        return round(self.factor * self.original_tokens)


class StageSection(Section):
    """One stage: a run in the folder NN-NAME of the plan's folder."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,49}$", description="name of the stage: letters, digits, dots, _ and -"
    )
    start: StartFrom = Field(
        StartFrom.LAST,
        alias="from",
        description="policy of the stage before that this one begins with; best: by pass@1 on its held-out problems",
    )
    changes: dict[str, Any] = Field(
        {}, alias="set", description="keys of this configuration that the stage changes, as set.run.total_batches = 10"
    )
    yarn: YarnSection = YarnSection()

    def _faults(self) -> Iterator[str]:
        for name in NOT_IN_A_STAGE:
            node: Any = self.changes
            for part in name.split("."):
                node = node.get(part) if isinstance(node, dict) else None
            if node is not None:
                yield f"a stage cannot set {name}: it is the same in all stages"


class PlanSection(Section):
    """Stages that `nouscoder train` runs one after the other; without any it makes one run."""

    stages: tuple[StageSection, ...] = Field((), description="the stages, in order")

    def _faults(self) -> Iterator[str]:
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            yield f"two stages have one name: {', '.join(names)}"
        if self.stages and self.stages[0].start is StartFrom.BEST:
            yield 'the first stage begins with policy.path: it has no from = "best"'


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with the values of `changes`, section by section.

    A section with another `name` or `kind`, such as another objective, replaces the one of `tree`, whose keys it does
    not have. Changes of a list of sections are by index; one more section is put at its end.
    """
    whole = dict(tree)
    for key, value in changes.items():
        before = whole.get(key)
        whole[key] = value
        if isinstance(before, list) and isinstance(value, Mapping):
            sections = {str(index): each for index, each in enumerate(before)}
            for index, change in value.items():
                renamed = {name: change[name] for name in ("name",) if name in change}
                sections[index] = merged({**sections.get(index, {}), **renamed}, change)
            whole[key] = [*sections.values()]
        elif isinstance(before, Mapping) and isinstance(value, Mapping):
            kinds = [name for name in ("name", "kind") if name in before]
            if all(value.get(name, before[name]) == before[name] for name in kinds):
                whole[key] = merged(before, value)
    return whole


_PROMPT = """Below is a programming problem. Write a new one of your own, which is different, about as hard, and \
solved by a program that reads its input and prints its answer. The answer must depend on the input, and there must be \
only one right answer.

Answer in exactly this form:
<question>
the whole problem, with the form of the input and of the output
</question>
<program>
a Python program that solves it
</program>
<inputs>
a JSON list of 5 to 10 different texts, each a whole input
</inputs>

The problem:
{example}"""


class SelfPlaySection(Section):
    """What `nouscoder self-play` does; `nouscoder train` does not read it."""

    rounds: int = Field(4, ge=1, le=49, description="rounds of proposing and training; run.total_batches is their sum")
    proposals: int = Field(
        128, ge=0, description="problems that are proposed in a round, a multiple of broker.group_size; 0: none"
    )
    solutions: int = Field(8, ge=2, description="the solver's samples for each valid proposal: they give its pass rate")
    agree: int = Field(
        2, ge=1, description="samples of the solver that must print what the reference prints; fewer reject a proposal"
    )
    prompt: str = Field(
        _PROMPT,
        min_length=1,
        description="what the proposer is asked; {example} is a problem of the training file or the pool",
    )
    max_new_tokens: int = Field(4096, ge=1, description="of a proposal")
    max_chars: int = Field(
        8000, ge=1, description="characters of a statement, of a program, and of all inputs together, at most"
    )
    min_inputs: int = Field(3, ge=2, description="different inputs of a proposal at least")
    max_inputs: int = Field(10, ge=2, description="inputs of a proposal that are used at most")
    near_duplicate: float = Field(
        0.8,
        ge=0.3,
        le=1,
        description="Jaccard similarity of statements from which a proposal is a near-duplicate of a training problem,"
        " a held-out problem or an earlier proposal",
    )
    proposer_steps: int = Field(
        2, ge=0, description="optimizer steps of the proposer on the proposals of a round; 0: it is not trained"
    )
    pool_size: int = Field(256, ge=1, description="accepted problems that are trained on at most")
    pool_share: float = Field(
        0.5, gt=0, lt=1, description="share of the pool among the problems of a round's training, if there are enough"
    )
    max_age: int = Field(4, ge=1, description="rounds that train on an accepted problem at most")
    solved_at: float = Field(
        0.95, gt=0, le=1, description="a problem leaves the pool when a round's training solves it at this rate"
    )

    def _faults(self) -> Iterator[str]:
        if self.agree > self.solutions - 1:
            yield "agree must be less than solutions: a problem that all samples solve is not accepted"
        if self.max_inputs < self.min_inputs:
            yield "max_inputs must not be less than min_inputs"


class MutualTlsSection(Section):
    """Mutual TLS between broker, generation, learner and their clients.

    The verifier's server uses verifier.tls instead. Either all three files are set, or none.
    """

    certificate: InputFile = Field("", description="PEM file of this process's certificate chain; empty turns TLS off")
    key: InputFile = Field("", description="PEM file of its private key")
    ca: InputFile = Field("", description="PEM file of the authority that signed the certificates of all services")
    server_name: str = Field(
        "", description="for commands that ask a broker: the name in its certificate; empty: the host of its address"
    )

    def _faults(self) -> Iterator[str]:
        if len({bool(self.certificate), bool(self.key), bool(self.ca)}) > 1:
            yield "give certificate, key and ca together"


class EvaluationSection(Section):
    """How pass@1 of the policies of a run is measured: before, during and after the training."""

    every_batches: int = Field(
        0, ge=0, description="pass@1 is measured after this many batches too, while training goes on; 0: it is not"
    )
    keep_put_off: int = Field(
        2,
        ge=0,
        description="policies whose evaluation was put off, by another one or an interruption, that are kept at most,"
        " with their checkpoints, and measured after the training",
    )
    samples: int = Field(1, ge=1, description="rollouts for each problem; pass@k is known for k up to this number")
    problems: InputFile = Field(
        "",
        description="problem file of the evaluations; empty: problems.held_out, or the share problems.held_out_share",
    )
    temperature: float = Field(-1.0, ge=-1, description="softmax temperature; -1: that of generation.sampling")
    top_p: float = Field(
        0.0, ge=0, le=1, description="nucleus sampling, with every engine; 0: top_p of generation.sampling"
    )
    top_k: int = Field(-1, ge=-1, description="number of candidate tokens; 0: all; -1: top_k of generation.sampling")
    min_p: float = Field(
        -1.0,
        ge=-1,
        le=1,
        description="a candidate has at least this share of the probability of the most likely token; -1: min_p of"
        " generation.sampling",
    )
    max_tokens_total: int = Field(
        0,
        ge=0,
        description="maximum number of tokens in prompt and completion together, which may be more or less than in"
        " training; 0: generation.max_tokens_total",
    )
    max_new_tokens: int = Field(
        0,
        ge=0,
        description="maximum number of tokens in a completion; 0: what evaluation.max_tokens_total leaves, or without"
        " that the number of generation.sampling",
    )
    seed: int = Field(-1, ge=-1, description="seed of the samples, which are the same for each policy; -1: run.seed")
    limit_s: float = Field(
        3600.0,
        gt=0,
        le=86_400,
        description="seconds for which generation keeps the policy that is measured at most; an evaluation that is"
        " sampled longer fails",
    )
    end_at_pass_at_1: float = Field(
        0.0, ge=0, le=1, description="the run ends early when an evaluation reaches this pass@1; 0: never"
    )
    end_after_no_gain: int = Field(
        0,
        ge=0,
        description="the run ends early when this many evaluations bring no gain over the best before; 0: never",
    )

    def _faults(self) -> Iterator[str]:
        if (self.end_at_pass_at_1 or self.end_after_no_gain) and not self.every_batches:
            yield "end_at_pass_at_1 and end_after_no_gain need every_batches"
        for name in ("temperature", "min_p"):
            if -1 < getattr(self, name) < 0:
                yield f"{name} must be at least 0, or -1 for that of generation.sampling"

    def of(self, generation: GenerationSection) -> GenerationSection:
        """`generation` as it is for evaluations: its context and sampling are those of this section where given."""
        given = {"temperature": self.temperature, "top_k": self.top_k, "min_p": self.min_p}
        sampling = {name: value for name, value in given.items() if value >= 0}
        if self.top_p:
            sampling["top_p"] = self.top_p
        if self.max_new_tokens or self.max_tokens_total:
            sampling["max_new_tokens"] = self.max_new_tokens or max(1, self.max_tokens_total - 1)
        changed = {
            "max_tokens_total": self.max_tokens_total or generation.max_tokens_total,
            "sampling": generation.sampling.model_copy(update=sampling),
        }
        return generation.model_copy(update=changed)
