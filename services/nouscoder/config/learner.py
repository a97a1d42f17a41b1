"""The learner's section: objective, optimizer, types of numbers, LoRA, checkpoints; and what only fine-tuning reads.

`nouscoder sft` takes the rest of its settings from [learner].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import StrEnum

from pydantic import Field

from nouscoder.config.devices import Device, device_key
from nouscoder.objectives.advantage import AdvantageSection
from nouscoder.objectives.correction import CorrectionKind, CorrectionSection
from nouscoder.objectives.dapo import Dapo
from nouscoder.objectives.distillation import Distillation
from nouscoder.objectives.entropy import EntropySection
from nouscoder.objectives.ppo import Ppo, Proximal
from nouscoder.objectives.reference_kl import ReferenceKlSection
from nouscoder.objectives.registry import ObjectiveSettings
from nouscoder.sections import InputFile, InputPaths, OutputFile, Section, ServiceSection, grpc_address


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
    """What the learner publishes of a policy with adapters."""

    MERGED = "merged"
    ADAPTER = "adapter"


class LoraSection(Section):
    """Low-rank adapters (LoRA): only they are trained, and the other weights stay those of the first policy."""

    rank: int = Field(0, ge=0, description="rank of the adapters; 0: no adapters, all weights are trained")
    alpha: float = Field(32.0, gt=0, description="the product of an adapter's two matrices is scaled by alpha / rank")
    target_modules: tuple[str, ...] = Field(
        (),
        description="names of the layers that get an adapter, without the path to them; empty: all linear layers of the"
        " decoder and its experts, without routers",
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

    def _faults(self) -> Iterator[str]:
        if self.publishes_adapters and not self.rank:
            yield "publication adapter needs adapters: set rank to 1 or more"


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


class Attention(StrEnum):
    """The kernel of the learner's attention. AUTO is the first of FLASH, VARLEN, SDPA that runs."""

    AUTO = "auto"
    SDPA = "sdpa"
    VARLEN = "varlen"
    FLASH = "flash"


class ActivationCheckpointing(StrEnum):
    """What the forward pass keeps of each decoder layer. The backward pass computes the rest again.

    NONE keeps all; SELECTIVE the results of matrix products and attention; ATTENTION the layer's input and the
    result of attention, whose time grows with the square of a rollout's length; FULL the layer's input; OFFLOADED the
    layer's input in the CPU's memory.
    """

    NONE = "none"
    SELECTIVE = "selective"
    ATTENTION = "attention"
    FULL = "full"
    OFFLOADED = "offloaded"


class DecayKind(StrEnum):
    """The learning rate after the warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"


class ScheduleSection(Section):
    """The learning rate over the steps of the run."""

    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up")
    decay: DecayKind = Field(DecayKind.CONSTANT, description="after the warm-up; cosine: falls until decay_steps")
    decay_steps: int = Field(0, ge=0, description="for cosine: the step, from the run's start, that reaches the floor")
    floor: float = Field(0.0, ge=0, le=1, description="for cosine: the lowest rate, as a share of learning_rate")

    def _faults(self) -> Iterator[str]:
        if self.decay is DecayKind.COSINE and self.decay_steps <= self.warmup_steps:
            yield "cosine needs decay_steps above warmup_steps"
        if self.decay is DecayKind.CONSTANT and (self.decay_steps or self.floor):
            yield "decay_steps and floor are for decay cosine"

    def factor(self, step: int) -> float:
        """The factor on learner.learning_rate for the step after `step` steps, in (0, 1].

        Warm-up: (step + 1) / (warmup_steps + 1). Cosine (Loshchilov and Hutter, arXiv 1608.03983, equation 5): from 1
        at the end of the warm-up to `floor` at decay_steps, and `floor` after it.
        """
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.decay is DecayKind.CONSTANT:
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        return self.floor + (1.0 - self.floor) * (1.0 + math.cos(math.pi * done)) / 2.0


class LearnerSection(ServiceSection):
    """Objective, optimizer and checkpoints."""

    grpc: str = grpc_address(50054)
    objective: ObjectiveSettings = Field(
        Dapo(), description="the objective, one of several sections, chosen by its key name; default dapo"
    )
    correction: CorrectionSection = CorrectionSection()
    reference_kl: ReferenceKlSection = ReferenceKlSection()
    entropy: EntropySection = EntropySection()
    advantage: AdvantageSection = AdvantageSection()
    schedule: ScheduleSection = ScheduleSection()
    steps_per_batch: int = Field(4, ge=1, description="PPO-off-policy-k: optimizer steps for each batch")
    learning_rate: float = Field(1e-6, gt=0, description="learning rate of AdamW after the warm-up")
    weight_decay: float = Field(0.0, ge=0, description="weight decay of AdamW")
    adam_betas: tuple[float, float] = Field((0.9, 0.999), description="decay of AdamW's two moments")
    max_gradient_norm: float = Field(1.0, gt=0, description="gradients with a larger norm are scaled down to it")
    skip_gradient_norm: float = Field(
        0.0, ge=0, description="a step whose gradient has a larger norm changes no weights and is counted; 0: none"
    )
    microbatch_tokens: int = Field(
        16384, ge=1, description="tokens of the rollouts packed into one forward pass; a longer rollout has its own"
    )
    attention: Attention = Field(
        Attention.AUTO,
        description="kernel of attention: sdpa on any machine; varlen (torch) and flash (flash-attention 2, when"
        " installed) on CUDA in 16 bits; auto: the best that runs here",
    )
    context_parallel: int = Field(
        1,
        ge=1,
        description="ranks that hold each packed row together, a part of its tokens each, for long rollouts; the number"
        " of ranks is a multiple of it",
    )
    activation_checkpointing: ActivationCheckpointing = Field(
        ActivationCheckpointing.NONE, description="what is kept of each layer for the backward pass"
    )
    checkpointed_layers: int = Field(
        0,
        ge=0,
        description="only so many layers, the first ones, are checkpointed, and the others keep all: as few as memory"
        " allows; 0: all",
    )
    dtype: ComputeType = Field(
        ComputeType.FLOAT32, description="type of the forward and backward pass; masters are float32 in each case"
    )
    optimizer: OptimizerKind = Field(
        OptimizerKind.ADAMW,
        description="adamw for all weights, or muon for the matrices of the decoder layers and adamw for the others",
    )
    matrix_learning_rate: float = Field(
        0.02, gt=0, description="for muon: learning rate of the matrices after the warm-up"
    )
    optimizer_states: OptimizerStates = Field(
        OptimizerStates.FLOAT32, description="AdamW's moments: float32, 8bit, or cpu (float32 in the CPU's memory)"
    )
    compile: bool = Field(
        False, description="compile the decoder layers by torch.compile; needs a C++ compiler on the learner's machine"
    )
    lora: LoraSection = LoraSection()
    reward_model: RewardModelSection = RewardModelSection()
    first_checkpoint: InputFile = Field(
        "",
        description="checkpoint of another run that a new run begins with: weights, moments, entropy coefficient;"
        " policy.path has the policy of the same version (nouscoder export)",
    )
    checkpoint_every_batches: int = Field(
        10, ge=1, description="a checkpoint is begun after this many batches, or after checkpoint_every_s"
    )
    checkpoint_every_s: float = Field(
        900.0, gt=0, description="a checkpoint is begun after the first batch that ends this long after the last one"
    )
    keep_checkpoints: int = Field(
        2,
        ge=1,
        description="newest checkpoints kept; with evaluation.every_batches that of the best evaluated policy is"
        " kept as well",
    )
    keep_policies: int = Field(4, ge=2, description="newest published policies kept; generation may be reading one")
    policy_shard_bytes: int = Field(
        4 * 1024**3, ge=1, description="a published policy is cut into safetensors files of at most this size"
    )
    policy_deltas: bool = Field(
        False,
        description="with generation.policy_from learner, or vllm.weight_transfer other than files: publish also"
        " what changed since the policy before, and send only that where the policy before is at hand",
    )
    transfer_host: str = Field(
        "",
        description="with generation.vllm.weight_transfer other than files: host or address of the learner that vLLM's"
        " workers reach on any port; empty: that of grpc",
    )
    keep_batches: int = Field(
        16, ge=1, description="newest saved batches kept; those that no checkpoint holds yet are kept as well"
    )
    replay_batches: int = Field(
        0,
        ge=0,
        description="newest earlier batches that are trained on again, together with each new one; at most"
        " keep_batches; needs importance weights",
    )
    samples_per_batch: int = Field(8, ge=0, description="rollouts of a batch written to samples.jsonl")
    batch_patience_s: float = Field(3600.0, gt=0, description="seconds without a batch before the learner gives up")
    start_after: str = Field(
        "", description="file in the run folder that must exist before the learner trains; empty: it does not wait"
    )
    folder_patience_s: float = Field(
        0.0, ge=0, description="seconds to wait while another learner still holds the run folder"
    )
    serve_after_run: bool = Field(
        False, description="after the last batch, keep serving the policies until SIGTERM instead of exiting"
    )
    peak_flops: float = Field(0.0, ge=0, description="the device's peak for the MFU; 0 measures a matrix product")
    rank_patience_s: float = Field(
        600.0, gt=0, description="seconds without an answer after which another rank of the learner counts as lost"
    )
    threads: int = Field(1, ge=1, description="CPU threads of the training")
    device: Device = device_key()

    @property
    def teacher(self) -> str:
        """The folder of the teacher, which is the reference policy then; empty when it is the initial policy."""
        return self.objective.teacher if isinstance(self.objective, Distillation) else ""

    @property
    def corrects_other_policies(self) -> bool:
        """Whether importance weights correct tokens that another policy version has sampled."""
        return self.correction.kind is not CorrectionKind.NONE or self._ratio_is_to_the_sampler

    @property
    def _ratio_is_to_the_sampler(self) -> bool:
        return isinstance(self.objective, Ppo) and self.objective.proximal is Proximal.SAMPLER

    def _faults(self) -> Iterator[str]:
        if self._ratio_is_to_the_sampler and self.correction.kind is not CorrectionKind.NONE:
            yield "with objective.proximal sampler the ratio corrects already: set correction.kind to none"
        if self.teacher and self.reference_kl.coefficient:
            yield "the teacher of distillation is the reference policy: set reference_kl.coefficient to 0"
        if self.replay_batches > self.keep_batches:
            yield f"replay_batches {self.replay_batches} is more than keep_batches {self.keep_batches}"
        if self.replay_batches and not self.corrects_other_policies:
            yield "replay_batches needs importance weights: choose a correction.kind other than none"
        if self.optimizer is OptimizerKind.MUON and self.optimizer_states is OptimizerStates.EIGHT_BIT:
            yield "optimizer_states 8bit are those of AdamW: with optimizer muon choose float32 or cpu"
        if self.policy_deltas and self.lora.publishes_adapters:
            yield (
                "policy_deltas is for whole weights, and lora.publication adapter publishes none: set policy_deltas to"
                " false"
            )
        if self.first_checkpoint and self.lora.rank:
            yield (
                "first_checkpoint is for runs that train whole weights: the exported policy of a run with adapters has"
                " them merged, so their moments belong to no weight of the new run"
            )
        if self.compile and self.activation_checkpointing is ActivationCheckpointing.SELECTIVE:
            yield (
                "activation_checkpointing selective chooses operations inside a layer, which compile hides: choose"
                " attention or full"
            )


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

    def _faults(self) -> Iterator[str]:
        if self.validation and self.validation_share:
            yield "give either validation or validation_share"
