"""The sections of the run itself: its name, its problems, its first policy, and the demo's."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from nouscoder.config.base import InputFile, Model, OutputFile, OutputPath, RunInput, Section


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

    @model_validator(mode="after")
    def _drift(self) -> GuardsSection:
        if 0 < self.length_drift <= 1:
            raise ValueError("length_drift must be above 1, or 0 for none")
        return self


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
    evaluate_every_batches: int = Field(
        0, ge=0, description="pass@1 is measured after this many batches too, while training goes on; 0: it is not"
    )
    evaluation_limit_s: float = Field(
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
        (), description="tools that get the metrics too; docs/architecture.md says where each puts them"
    )
    pages: str = Field("", description="HTTP address for the run's report and files; empty: none")
    verifier_token_file: InputFile = Field(
        "",
        description="file with the token that evaluations and environments send to a verifier that has a tokens_file",
    )

    @model_validator(mode="after")
    def _each_sink_once(self) -> RunSection:
        if len(set(self.sinks)) != len(self.sinks):
            raise ValueError("sinks names one of them twice")
        return self

    @model_validator(mode="after")
    def _early_end_needs_evaluations(self) -> RunSection:
        if (self.end_at_pass_at_1 or self.end_after_no_gain) and not self.evaluate_every_batches:
            raise ValueError("end_at_pass_at_1 and end_after_no_gain need evaluate_every_batches")
        return self

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
    held_out_samples: int = Field(1, ge=1, description="rollouts for each held-out problem")


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

    train_problems: int = Field(1200, ge=1, description="problems to train on")
    held_out_problems: int = Field(180, ge=1, description="problems for pass@1 before and after")
    warm_start_share: float = Field(1.0, gt=0, description="factor on the number of steps of the supervised phase")
    proposal_share: float = Field(
        0.0, ge=0, le=1, description="share of the demonstrations that propose problems, for `nouscoder self-play`"
    )
    warm_start_threads: int = Field(2, ge=1, description="CPU threads of the supervised phase")
