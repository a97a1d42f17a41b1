"""How the learner holds and changes weights: types of numbers, optimizers and their states, LoRA."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from nouscoder.config.base import InputFile, Section


class ComputeType(StrEnum):
    """The type of the forward and the backward pass. The optimizer changes float32 weights (masters) in each case."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class OptimizerKind(StrEnum):
    """ADAMW for all weights; MUON for the matrices of the decoder layers, with AdamW for the others."""

    ADAMW = "adamw"
    MUON = "muon"


class OptimizerStates(StrEnum):
    """How AdamW keeps its two moments.

    FLOAT32: 8 bytes a weight, on the device. EIGHT_BIT: 2 bytes a weight, in blocks of 256 with a common scale. CPU:
    as FLOAT32, with moments and masters in the CPU's memory, where they are changed.
    """

    FLOAT32 = "float32"
    EIGHT_BIT = "8bit"
    CPU = "cpu"


class LoraPublication(StrEnum):
    """What the learner publishes of a policy with adapters.

    MERGED: whole weights, with the adapters merged into them. ADAPTER: only the adapters, which generation merges into
    the weights of the first policy.
    """

    MERGED = "merged"
    ADAPTER = "adapter"


class LoraSection(Section):
    """Low-rank adapters (LoRA): only they are trained, and the other weights stay those of the first policy."""

    rank: int = Field(0, ge=0, description="rank of the adapters; 0: no adapters, all weights are trained")
    alpha: float = Field(32.0, gt=0, description="the product of an adapter's two matrices is scaled by alpha / rank")
    target_modules: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        description="names of the linear layers that get an adapter, without the path to them",
    )
    publication: LoraPublication = Field(
        LoraPublication.MERGED,
        description="merged: publish whole weights; adapter: publish only the adapters, which generation merges into"
        " the weights of the first policy",
    )

    @property
    def publishes_adapters(self) -> bool:
        """Whether a published policy is an adapter of the first one."""
        return self.publication is LoraPublication.ADAPTER

    @model_validator(mode="after")
    def _has_targets(self) -> LoraSection:
        if self.rank and not self.target_modules:
            raise ValueError("target_modules is empty: name the layers that get an adapter, or set rank to 0")
        return self

    @model_validator(mode="after")
    def _has_adapters_to_publish(self) -> LoraSection:
        if self.publishes_adapters and not self.rank:
            raise ValueError("publication adapter needs adapters: set rank to 1 or more")
        return self


class RewardModelSection(Section):
    """A reward model beside the verified rewards, as AceCoder has one; the verified rewards themselves never change."""

    path: InputFile = Field(
        "", description="folder that `nouscoder reward-model train` made, with the policy's tokens; empty: none"
    )
    weight: float = Field(
        0.0,
        ge=0,
        description="the model's scores, whitened over the batch, times this are added to the rewards that advantages"
        " are made of; 0: the scores are only compared with the verified rewards",
    )
