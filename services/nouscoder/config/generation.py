"""Generation's section: sampling, engines, and the environments: one section each, chosen by its `kind`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from nouscoder.config.devices import Device, device_key
from nouscoder.config.verifier import TlsSection
from nouscoder.domain.conversation import TEXT_CHARS, TURNS
from nouscoder.domain.policy import Transport, WeightTransfer
from nouscoder.domain.prompt import PromptForm
from nouscoder.entry_points import PATTERN
from nouscoder.sections import InputFile, OneOf, Options, OutputFile, Section, ServiceSection, grpc_address


def _kind(kind: str) -> Any:
    return Field(
        kind,
        description="single_turn: one prompt, one completion; feedback: the policy sees how its program fails the"
        " problem's public tests and tries again; interpreter: the policy may run Python before it answers; agent: a"
        " program of its own asks the policy through generation.openai; entry_point: a class of the user",
    )


class EnvironmentSection(Section):
    """Settings of every environment: how a problem becomes a prompt.

    What is not set is as the policy's folder says (nouscoder_prompt.json), if it has been trained here.
    """

    prompt_as: Literal["auto", "text", "messages"] = Field(
        "auto",
        description="text: the prompt as it is; messages: as a user's message in the policy's chat template;"
        " auto: messages if the policy has a chat template, else text",
    )
    prompt_form: PromptForm = Field(
        PromptForm.PLAIN,
        description="plain: the problem's statement, and its starter code if it has any; livecodebench, nouscoder,"
        " deepcoder, acereason: the published form, with starter code or for stdin; a problem with its own template is"
        " plain",
    )
    prompt_template: str = Field(
        "{prompt}",
        pattern=r"\{prompt\}",
        description="text around {prompt}; a problem may have its own template. {language} is the name of the problem's"
        " language, {block} the begin of its block, such as ```cpp",
    )
    system_prompt: str = Field(
        "auto",
        description="a system message before the prompt (prompt_as messages); empty: none; auto: that of the form,"
        " which only livecodebench has",
    )
    thinking: Literal["auto", "on", "off"] = Field(
        "auto", description="enable_thinking of the chat template; auto: as the template has it by default"
    )
    date: str = Field(
        "",
        description="day that a chat template with strftime_now (Llama 3.2, SmolLM3, Granite) writes, such as"
        " 2026-11-28; empty: the day on which a local run begins; other deployments must give it",
    )

    @field_validator("date", mode="before")
    @classmethod
    def _is_a_day(cls, value: object) -> str:
        try:
            return date.fromisoformat(str(value)).isoformat() if value else ""
        except ValueError:
            raise ValueError("a day is written as 2026-11-28") from None


class ToolsSection(EnvironmentSection):
    """Settings of environments with tools, which the verifier provides."""

    tool_limit_s: float = Field(
        120.0,
        gt=0,
        description="seconds to wait for an answer of the verifier; then the lease of the rollout is released",
    )


class SingleTurnSection(EnvironmentSection):
    """One prompt and one completion, which is graded."""

    kind: Literal["single_turn"] = _kind("single_turn")


class FeedbackSection(ToolsSection):
    """Up to `turns` programs. After each but the last, the policy sees how it failed the public tests."""

    kind: Literal["feedback"] = _kind("feedback")
    turns: int = Field(TURNS, ge=1, description="maximum number of turns; the program of the last is graded")
    feedback_chars: int = Field(
        TEXT_CHARS,
        ge=40,
        description="characters of each text in the feedback: input, outputs, message; longer ones are cut",
    )


class InterpreterSection(ToolsSection):
    """Up to `calls` calls of a Python interpreter, then the answer."""

    kind: Literal["interpreter"] = _kind("interpreter")
    calls: int = Field(5, ge=1, description="calls of the interpreter at most; the turn after the last is the answer")
    call_begin: str = Field("<python>", min_length=1, description="what the policy writes before the code of a call")
    call_end: str = Field("</python>", min_length=1, description="what it writes after the code, to end its turn")
    output_begin: str = Field("<output>\n", description="what precedes the output of a call")
    output_end: str = Field("\n</output>", description="what follows the output of a call")
    output_chars: int = Field(2000, ge=40, description="characters of an output; a longer one loses its middle")


class AgentSection(EnvironmentSection):
    """An agent, which claims sessions from generation.openai, makes each rollout."""

    kind: Literal["agent"] = _kind("agent")
    agent_session_s: float = Field(
        120.0,
        gt=0,
        description="seconds without a request of its agent after which a rollout is given up; a batch may wait",
    )


class EntryPointSection(ToolsSection):
    """A class of the user, as docs/environments.md describes."""

    kind: Literal["entry_point"] = _kind("entry_point")
    entry_point: str = Field(pattern=PATTERN, description="package.module:Class")
    options: Options = Field({}, description="options of the class, passed to it unchecked")


Environment = Annotated[
    SingleTurnSection | FeedbackSection | InterpreterSection | AgentSection | EntryPointSection,
    OneOf("kind", default="single_turn"),
]


# Settings that people know from other systems and that a run refuses, each with the reason and what to do. A key that
# is only unknown gets the nearest known name.

_LORA = (
    "the adapters of learner.lora are merged into the weights when a policy is published or loaded; vLLM fixes the"
    " adapter of a request when it begins, so a policy could not change in flight"
)
_SPECULATION = (
    "the draft model would not learn with the policy, and no test shows that the log-probabilities of accepted drafts"
    " are those of the distribution that the learner assumes"
)
_FP8 = (
    "rounded weights or keys and values sample from another policy than the one in training, and no test shows that"
    " learner.correction makes up for it; the data type is generation.vllm.dtype"
)
_REPLICAS = (
    "one service samples with one copy of the weights; start a second generation service instead: the broker shares"
    " the tasks among all of them, and each loads every policy"
)
_ZERO_MISMATCH = (
    "sampler and learner use different kernels, so their log-probabilities always differ a little; the vllm engine on a"
    " GPU removes the part that depends on the batch (generation.vllm.batch_invariant), learner.correction corrects the"
    " rest, and the mismatch_* figures of each step measure it"
)

_GENERATION: Mapping[str, str] = {"zero_mismatch": _ZERO_MISMATCH, "lora": _LORA}
_VLLM: Mapping[str, str] = {
    **dict.fromkeys(("enable_lora", "lora_modules", "lora"), _LORA),
    **dict.fromkeys(("speculative_config", "speculative_model", "num_speculative_tokens"), _SPECULATION),
    **dict.fromkeys(("quantization", "kv_cache_dtype"), _FP8),
    **dict.fromkeys(("data_parallel_size", "data_parallel_rank"), _REPLICAS),
    "zero_mismatch": _ZERO_MISMATCH,
}
_SPARSE = (
    "take gloo, nccl or ipc and set learner.policy_deltas: then only the changed values are sent to an engine that has"
    " the policy before"
)
_TRANSFERS: Mapping[str, str] = {"sparse_nccl": _SPARSE}
_OPENAI_ENGINE = (
    "a server with OpenAI's API cannot sample for a run: it takes no weights from the learner, does not say which"
    " policy version sampled a token, and need not give log-probabilities; to measure such a server use:"
    " nouscoder eval PROBLEMS --url URL --model NAME"
)


def _refuse(given: object, refused: Mapping[str, str]) -> None:
    """Raises ValueError with the reason for the first refused key of an unchecked section."""
    for name in given if isinstance(given, dict) else ():
        if name in refused:
            raise ValueError(f"{name} is refused: {refused[name]}")


class SamplingSection(Section):
    """How training rollouts are sampled."""

    temperature: float = Field(1.0, ge=0, description="softmax temperature; 0 always takes the most likely token")
    top_p: float = Field(
        1.0, gt=0, le=1, description="nucleus sampling: cumulative probability of the candidate tokens"
    )
    top_k: int = Field(0, ge=0, description="number of candidate tokens, the most likely ones; 0: all")
    min_p: float = Field(
        0.0, ge=0, le=1, description="a candidate has at least this share of the probability of the most likely token"
    )
    stop: tuple[str, ...] = Field(
        (), description="texts that end an answer, and stay in it; besides the policy's end-of-turn tokens"
    )
    stop_token_ids: tuple[int, ...] = Field(
        (), description="tokens that end an answer, besides the policy's end-of-turn tokens"
    )
    max_new_tokens: int = Field(128, ge=1, description="maximum number of tokens in a completion")
    ramp_batches: int = Field(
        0, ge=0, description="batches over which the temperature goes linearly to final_temperature; 0: it stays"
    )
    final_temperature: float = Field(1.0, gt=0, description="with ramp_batches: the temperature after the ramp")

    def temperature_at(self, version: int) -> float:
        """That of a group which is admitted under this policy version: there is one version a batch."""
        if not self.ramp_batches:
            return self.temperature
        share = min(1.0, version / self.ramp_batches)
        return self.temperature + share * (self.final_temperature - self.temperature)

    @field_validator("stop", "stop_token_ids")
    @classmethod
    def _can_end_an_answer(cls, values: tuple[str | int, ...]) -> tuple[str | int, ...]:
        if any(value == "" or (isinstance(value, int) and value < 0) for value in values):
            raise ValueError("a text must not be empty, and a token id is at least 0")
        return values


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
        0,
        ge=0,
        description="maximum number of tokens in one step, longer prompts take several; 0: vLLM's choice for work"
        " offline, which on an H100 or H200 is 16,384",
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
        description="how a policy comes to vLLM: files; or from the learner's memory by gloo (TCP), nccl (GPUs) or ipc"
        " (memory that both share, on one machine), and from the files when that fails",
    )
    transfer_limit_s: float = Field(
        300.0, gt=0, description="a transfer from the learner's memory that takes longer is given up for the files"
    )

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, given: Any) -> Any:
        _refuse(given, _VLLM)
        return given

    @field_validator("weight_transfer", mode="before")
    @classmethod
    def _no_other_transfer(cls, given: object) -> object:
        _refuse({given: None} if isinstance(given, str) else None, _TRANSFERS)
        return given


class FakeSection(Section):
    """The settings of the fake engine: how long a step takes, and how long completions are."""

    step_s: float = Field(0.0, ge=0, description="seconds of a step, which samples one token of each running rollout")
    median_tokens: int = Field(
        0, ge=0, description="median length of completions, which is log-normal; 0: eight tokens each"
    )
    sigma: float = Field(0.0, ge=0, description="standard deviation of the logarithm of the length")


class OpenAISection(Section):
    """An HTTP API in OpenAI's form that samples from the policy in use, for agents, people and evaluations."""

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
        8, ge=1, description="completions at the same time, in places beside max_running, so rollouts keep theirs"
    )
    max_requests: int = Field(
        128, ge=1, description="requests in progress; one client has at most half of those that others leave"
    )
    max_body_bytes: int = Field(4 * 1024**2, ge=1024, le=8 * 1024**2, description="largest request")
    request_limit_s: float = Field(3600.0, gt=0, description="seconds after which a request is given up")


class GenerationSection(ServiceSection):
    """The generation worker and its engine."""

    engine: Literal["auto", "torch", "vllm", "fake"] = Field(
        "auto",
        description="torch and vllm sample from the policy; fake generates tokens without a model, for tests; auto:"
        " vllm on a GPU where it is installed, runs the policy and fits the other keys, else torch",
    )
    vllm: VllmSection = VllmSection()
    fake: FakeSection = FakeSection()
    grpc: str = grpc_address(50053)
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
    device: Device = device_key()
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="of the torch engine: type of weights, activations and cache; bfloat16 is about twice as fast on a"
        " CPU that computes in it (avx512_bf16 or amx_bf16 in lscpu) and many times on a GPU",
    )
    policy_from: Transport = Field(
        Transport.FOLDER,
        description="folder: read policies from a disk shared with the learner; learner: download them from it",
    )
    cache: OutputFile = Field(
        "",
        description="with policy_from learner: folder for downloaded policies; the newest 2 and the base of adapters"
        " are kept; empty: a private one, nouscoder-policies-UID, in the temporary folder",
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

    @property
    def guest_places(self) -> int:
        """The places of the engine for completions of the API, beside those of rollouts."""
        return self.openai.slots if self.openai.http else 0

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, given: Any) -> Any:
        _refuse(given, _GENERATION)
        return given

    @field_validator("engine", mode="before")
    @classmethod
    def _no_foreign_server(cls, engine: object) -> object:
        if engine == "openai":
            raise ValueError(_OPENAI_ENGINE)
        return engine

    def _faults(self) -> Iterator[str]:
        if isinstance(self.environment, AgentSection) and not self.openai.http:
            yield "environment.kind agent needs openai.http, the address at which agents claim sessions"
        transfer = self.vllm.weight_transfer
        if transfer is not WeightTransfer.FILES and self.engine != "vllm":
            yield f"vllm.weight_transfer {transfer} needs the vllm engine: other engines read the files"
        if transfer is WeightTransfer.NCCL and self.device.partition(":")[0] != "cuda":
            yield f'vllm.weight_transfer nccl needs CUDA, and device is "{self.device}": take gloo'
        if transfer is WeightTransfer.NCCL and self.vllm.tensor_parallel_size > 1:
            yield (
                "vllm.weight_transfer nccl needs tensor_parallel_size 1: NCCL may wait for ever when weights arrive"
                " while the workers exchange activations; take gloo"
            )
        if self.vllm.batch_invariant and (self.engine != "vllm" or self.device.partition(":")[0] == "cpu"):
            yield (
                "vllm.batch_invariant needs the vllm engine on a GPU: the sums of the torch engine and of kernels for"
                " CPUs are in an order that depends on the batch"
            )
