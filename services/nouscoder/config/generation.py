"""The generation worker's section."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from nouscoder.config import refused
from nouscoder.config.base import InputFile, OutputPath, Section
from nouscoder.config.environment import Environment, SingleTurnSection
from nouscoder.config.verifier import TlsSection
from nouscoder.domain.policy import Transport, WeightTransfer


class SamplingSection(Section):
    """How training rollouts are sampled."""

    temperature: float = Field(1.0, ge=0, description="softmax temperature; 0 always takes the most likely token")
    top_p: float = Field(
        1.0, gt=0, le=1, description="nucleus sampling: cumulative probability of the candidate tokens"
    )
    max_new_tokens: int = Field(128, ge=1, description="maximum number of tokens in a completion")


class VllmSection(Section):
    """The settings of the vllm engine; other engines do not read them."""

    on_update: Literal["recompute", "keep"] = Field(
        "recompute",
        description="new weights: recompute the keys and values of running rollouts with them, or keep the older ones",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="data type of weights and activations; auto: as config.json of the policy says"
    )
    tensor_parallel_size: int = Field(1, ge=1, description="devices that share one copy of the weights")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of a device's memory for weights, activations and KV cache"
    )
    kv_cache_memory_bytes: int = Field(
        0, ge=0, description="bytes of the KV cache; 0: what gpu_memory_utilization leaves"
    )
    max_num_batched_tokens: int = Field(
        0, ge=0, description="maximum number of tokens in one step, longer prompts take several; 0: vLLM's choice"
    )
    prefix_caching: bool = Field(
        True, description="compute equal beginnings of prompts once; keys and values of older weights are never reused"
    )
    batch_invariant: bool = Field(
        False,
        description="kernels whose results do not depend on what else is in the batch (VLLM_BATCH_INVARIANT), slower;"
        " only on GPUs for which vLLM has them",
    )
    enforce_eager: bool = Field(False, description="no compilation and no CUDA graphs: starts faster, samples slower")
    update_limit_s: float = Field(600.0, gt=0, description="the engine fails when loading a policy takes longer")
    weight_transfer: WeightTransfer = Field(
        WeightTransfer.FILES,
        description="how a policy comes to vLLM: files; or from the learner's memory by gloo (TCP) or nccl (GPUs), and"
        " from the files when that fails",
    )
    transfer_limit_s: float = Field(
        300.0, gt=0, description="a transfer from the learner's memory that takes longer is given up for the files"
    )

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, given: Any) -> Any:
        refused.refuse(given, refused.VLLM)
        return given

    @field_validator("weight_transfer", mode="before")
    @classmethod
    def _no_other_transfer(cls, given: object) -> object:
        refused.refuse_transfer(given)
        return given


class FakeSection(Section):
    """The settings of the fake engine: how long a step takes, and how long completions are."""

    step_s: float = Field(0.0, ge=0, description="seconds of a step, which samples one token of each running rollout")
    median_tokens: int = Field(
        0, ge=0, description="median length of completions, which is log-normal; 0: eight tokens each"
    )
    sigma: float = Field(0.0, ge=0, description="standard deviation of the logarithm of the length")


class OpenAISection(Section):
    """An HTTP API in OpenAI's form that samples from the policy in use, for people and evaluations."""

    http: str = Field("", description="address of the API; empty: none")
    model: str = Field("", description="the model's name in requests and answers; empty: run.name")
    tokens_file: InputFile = Field(
        "",
        description="file of clients' tokens (nouscoder tokens new NAME), whose quotas do not apply; empty: no token is"
        " needed",
    )
    hosts: tuple[str, ...] = Field(
        (), description="without tokens: public host names of the service and of pages that may call it"
    )
    tls: TlsSection = TlsSection()
    slots: int = Field(
        8, ge=1, description="completions at the same time, in places of max_running; rollouts keep the others"
    )
    max_requests: int = Field(64, ge=1, description="requests in progress; more are refused")
    max_body_bytes: int = Field(4 * 1024**2, ge=1024, description="largest request")
    request_limit_s: float = Field(3600.0, gt=0, description="seconds after which a request is given up")


class GenerationSection(Section):
    """The generation worker and its engine."""

    engine: Literal["torch", "vllm", "fake"] = Field(
        "torch",
        description="torch and vllm sample from the policy; fake generates tokens without a model, for tests",
    )
    vllm: VllmSection = VllmSection()
    fake: FakeSection = FakeSection()
    grpc: str = Field("127.0.0.1:50053", description="address to listen on; port 0 takes a free one")
    metrics: str = Field("127.0.0.1:0", description="address of the Prometheus page")
    grpc_health: str = Field(
        "", description="address of a second port for health checks, not encrypted; empty: no port"
    )
    max_running: int = Field(64, ge=1, description="maximum number of rollouts decoded at the same time")
    max_tokens_total: int = Field(512, ge=2, description="maximum number of tokens in prompt and completion together")
    engine_tokens_total: int = Field(
        0,
        ge=0,
        description="tokens of prompt and completion that the engine is started for, so that a later stage of a plan"
        " may have more without a new start; 0: max_tokens_total, and in a plan the most of the stages to come",
    )
    partial_every_tokens: int = Field(
        1024,
        ge=0,
        description="a rollout is saved in the broker each time it has sampled so many tokens more, so that another"
        " worker can continue it; 0: never",
    )
    threads: int = Field(1, ge=1, description="CPU threads of the engine")
    device: str = Field("cpu", description="torch device")
    policy_from: Transport = Field(
        Transport.FOLDER,
        description="folder: read policies from a disk shared with the learner; learner: download them from it",
    )
    cache: OutputPath = Field(
        Path("/tmp/policies"),
        description="with policy_from learner: folder for downloaded policies; the newest 2 and the base of adapters"
        " are kept",
    )
    policy_patience_s: float = Field(
        900.0, gt=0, description="with policy_from learner: seconds to wait for the learner before giving up"
    )
    sampling: SamplingSection = SamplingSection()
    environment: Environment = Field(SingleTurnSection(), description="how a rollout is made from a problem")
    openai: OpenAISection = OpenAISection()

    @property
    def engine_tokens(self) -> int:
        """The tokens of prompt and completion that the engine is started for."""
        return max(self.max_tokens_total, self.engine_tokens_total)

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, given: Any) -> Any:
        refused.refuse(given, refused.GENERATION)
        return given

    @field_validator("engine", mode="before")
    @classmethod
    def _no_foreign_server(cls, engine: object) -> object:
        if engine == "openai":
            raise ValueError(refused.OPENAI_ENGINE)
        return engine

    @model_validator(mode="after")
    def _rollouts_keep_places(self) -> GenerationSection:
        if self.openai.http and self.openai.slots >= self.max_running:
            raise ValueError(
                f"openai.slots {self.openai.slots} must be less than max_running {self.max_running}, or no place in the"
                " engine is left for rollouts"
            )
        return self

    @model_validator(mode="after")
    def _transfer_exists(self) -> GenerationSection:
        transfer = self.vllm.weight_transfer
        if transfer is not WeightTransfer.FILES and self.engine != "vllm":
            raise ValueError(f"vllm.weight_transfer {transfer} needs the vllm engine: other engines read the files")
        if transfer is WeightTransfer.NCCL and self.device.partition(":")[0] != "cuda":
            raise ValueError(f'vllm.weight_transfer nccl needs CUDA, and device is "{self.device}": take gloo')
        if transfer is WeightTransfer.NCCL and self.vllm.tensor_parallel_size > 1:
            raise ValueError(
                "vllm.weight_transfer nccl needs tensor_parallel_size 1: NCCL may wait for ever when weights arrive"
                " while the workers exchange activations; take gloo"
            )
        return self

    @model_validator(mode="after")
    def _kernels_exist(self) -> GenerationSection:
        if self.vllm.batch_invariant and (self.engine != "vllm" or self.device.partition(":")[0] == "cpu"):
            raise ValueError(
                "vllm.batch_invariant needs the vllm engine on a GPU: the sums of the torch engine and of kernels for"
                " CPUs are in an order that depends on the batch"
            )
        return self
