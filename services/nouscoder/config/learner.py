"""The learner's section: objective, optimizer and checkpoints."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from nouscoder.config.base import InputFile, Section
from nouscoder.config.loss_terms import (
    AdvantageSection,
    CorrectionKind,
    CorrectionSection,
    EntropySection,
    ReferenceKlSection,
    ScheduleSection,
)
from nouscoder.config.objective import DapoSettings, DistillationSettings, ObjectiveSettings, PpoSettings, Proximal
from nouscoder.config.training import ComputeType, LoraSection, OptimizerKind, OptimizerStates, RewardModelSection


class Attention(StrEnum):
    """The kernel of the learner's attention.

    SDPA runs on any machine. VARLEN (torch's varlen_attn) and FLASH (flash-attention 2, an optional package) take
    packed rows as they are, and need CUDA and 16-bit activations. AUTO is the first of FLASH, VARLEN, SDPA that runs.
    """

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


class LearnerSection(Section):
    """Objective, optimizer and checkpoints."""

    grpc: str = Field("127.0.0.1:50054", description="address to listen on; port 0 takes a free one")
    metrics: str = Field("127.0.0.1:0", description="address of the Prometheus page")
    grpc_health: str = Field(
        "", description="address of a second port for health checks, not encrypted; empty: no port"
    )
    objective: ObjectiveSettings = Field(
        DapoSettings(), description="the objective, one of several sections, chosen by its key name; default dapo"
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
        description="newest checkpoints kept; with run.evaluate_every_batches that of the best evaluated policy is"
        " kept as well",
    )
    keep_policies: int = Field(4, ge=2, description="newest published policies kept; generation may be reading one")
    policy_shard_bytes: int = Field(
        4 * 1024**3, ge=1, description="a published policy is cut into safetensors files of at most this size"
    )
    policy_deltas: bool = Field(
        False,
        description="with generation.policy_from learner, or vllm.weight_transfer gloo or nccl: publish also what"
        " changed since the policy before, and send only that where the policy before is at hand",
    )
    transfer_host: str = Field(
        "",
        description="with generation.vllm.weight_transfer gloo or nccl: host or address of the learner that vLLM's"
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
    device: str = Field("cpu", description="torch device")

    @property
    def teacher(self) -> str:
        """The folder of the teacher, which is the reference policy then; empty when it is the initial policy."""
        return self.objective.teacher if isinstance(self.objective, DistillationSettings) else ""

    @property
    def corrects_other_policies(self) -> bool:
        """Whether importance weights correct tokens that another policy version has sampled."""
        return self.correction.kind is not CorrectionKind.NONE or self._ratio_is_to_the_sampler

    @property
    def _ratio_is_to_the_sampler(self) -> bool:
        return isinstance(self.objective, PpoSettings) and self.objective.proximal is Proximal.SAMPLER

    @model_validator(mode="after")
    def _one_correction(self) -> LearnerSection:
        if self._ratio_is_to_the_sampler and self.correction.kind is not CorrectionKind.NONE:
            raise ValueError("with objective.proximal sampler the ratio corrects already: set correction.kind to none")
        return self

    @model_validator(mode="after")
    def _one_reference(self) -> LearnerSection:
        if self.teacher and self.reference_kl.coefficient:
            raise ValueError("the teacher of distillation is the reference policy: set reference_kl.coefficient to 0")
        return self

    @model_validator(mode="after")
    def _replayed_batches_are_kept_and_corrected(self) -> LearnerSection:
        if self.replay_batches > self.keep_batches:
            raise ValueError(f"replay_batches {self.replay_batches} is more than keep_batches {self.keep_batches}")
        if self.replay_batches and not self.corrects_other_policies:
            raise ValueError("replay_batches needs importance weights: choose a correction.kind other than none")
        return self

    @model_validator(mode="after")
    def _muon_has_its_own_states(self) -> LearnerSection:
        if self.optimizer is OptimizerKind.MUON and self.optimizer_states is OptimizerStates.EIGHT_BIT:
            raise ValueError("optimizer_states 8bit are those of AdamW: with optimizer muon choose float32 or cpu")
        return self

    @model_validator(mode="after")
    def _adapters_have_no_deltas(self) -> LearnerSection:
        if self.policy_deltas and self.lora.publishes_adapters:
            raise ValueError(
                "policy_deltas is for whole weights, and lora.publication adapter publishes none: set policy_deltas to"
                " false"
            )
        return self

    @model_validator(mode="after")
    def _adapters_begin_anew(self) -> LearnerSection:
        if self.first_checkpoint and self.lora.rank:
            raise ValueError(
                "first_checkpoint is for runs that train whole weights: the exported policy of a run with adapters has"
                " them merged, so their moments belong to no weight of the new run"
            )
        return self

    @model_validator(mode="after")
    def _compiled_layers_are_computed_again_whole(self) -> LearnerSection:
        if self.compile and self.activation_checkpointing is ActivationCheckpointing.SELECTIVE:
            raise ValueError(
                "activation_checkpointing selective chooses operations inside a layer, which compile hides: choose"
                " attention or full"
            )
        return self
