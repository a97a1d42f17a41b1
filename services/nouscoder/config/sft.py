"""The section of `nouscoder sft`: examples, epochs and learning rate. The rest of its settings is in [learner]."""

from __future__ import annotations

from pydantic import Field, model_validator

from nouscoder.config.base import InputPaths, OutputFile, Section
from nouscoder.config.loss_terms import DecayKind


class SftScheduleSection(Section):
    """The learning rate over the steps of a fine-tuning."""

    warmup_share: float = Field(0.03, ge=0, lt=1, description="share of the steps with a linear warm-up")
    decay: DecayKind = Field(DecayKind.COSINE, description="after the warm-up; cosine: falls until the last step")
    floor: float = Field(
        0.1, ge=0, le=1, description="for cosine: the rate of the last step, as a share of learning_rate"
    )


class SftSection(Section):
    """What `nouscoder sft` trains on, and how often; `nouscoder train` does not read it."""

    train: InputPaths = Field(
        (), description="examples: JSON lines or parquet (docs/sft.md), or run folders, whose saved rollouts they are"
    )
    validation: InputPaths = Field((), description="examples of the same form for the validation loss")
    validation_share: float = Field(
        0.0, ge=0, lt=1, description="share of the problems of `train` that is kept for the validation loss instead"
    )
    validate_every_steps: int = Field(
        50, ge=1, description="the validation loss is measured after this many steps too, not only before and after"
    )
    wrong_below: float = Field(
        0.0,
        ge=0,
        le=1,
        description="wrong answers are kept for problems whose pass rate among the examples is below this (Klear's"
        " mixture by difficulty); 0: right answers only",
    )
    max_per_problem: int = Field(0, ge=0, description="examples of one problem at most; the seed chooses; 0: all")
    max_tokens: int = Field(
        0, ge=0, description="longer examples are dropped and counted; 0: those longer than the model's context"
    )
    epochs: int = Field(1, ge=1, description="how often each example is trained on")
    batch_size: int = Field(32, ge=1, description="examples of one optimizer step")
    learning_rate: float = Field(1e-5, gt=0, description="learning rate of AdamW after the warm-up")
    weight_decay: float = Field(0.0, ge=0, description="weight decay of the optimizer")
    adam_betas: tuple[float, float] = Field((0.9, 0.95), description="decay of AdamW's two moments")
    schedule: SftScheduleSection = SftScheduleSection()
    out: OutputFile = Field(
        "", description="the new Hugging Face folder; empty: the folder model of the run folder NAME-sft"
    )

    @model_validator(mode="after")
    def _one_validation(self) -> SftSection:
        if self.validation and self.validation_share:
            raise ValueError("give either validation or validation_share")
        return self
