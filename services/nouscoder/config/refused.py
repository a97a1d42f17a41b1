"""Settings that people know from other systems and that a run refuses, each with the reason.

A key that is only unknown gets the nearest known name. These get the reason instead, and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping

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

GENERATION: Mapping[str, str] = {"zero_mismatch": _ZERO_MISMATCH, "lora": _LORA}
VLLM: Mapping[str, str] = {
    **dict.fromkeys(("enable_lora", "lora_modules", "lora"), _LORA),
    **dict.fromkeys(("speculative_config", "speculative_model", "num_speculative_tokens"), _SPECULATION),
    **dict.fromkeys(("quantization", "kv_cache_dtype"), _FP8),
    **dict.fromkeys(("data_parallel_size", "data_parallel_rank"), _REPLICAS),
    "zero_mismatch": _ZERO_MISMATCH,
}
_IPC = (
    "the learner copies each policy to the CPU's memory before it publishes, and CUDA IPC shares only a GPU's memory;"
    " on one machine take gloo"
)
_SPARSE = (
    "take gloo or nccl and set learner.policy_deltas: then only the changed values are sent to an engine that has the"
    " policy before"
)
TRANSFERS: Mapping[str, str] = {"ipc": _IPC, "sparse_nccl": _SPARSE}
OPENAI_ENGINE = (
    "a server with OpenAI's API cannot sample for a run: it takes no weights from the learner, does not say which"
    " policy version sampled a token, and need not give log-probabilities; to measure such a server use:"
    " nouscoder eval PROBLEMS --url URL --model NAME"
)


def refuse_transfer(given: object) -> None:
    """Raises ValueError with the reason for a weight transfer of vLLM that a run does not use."""
    if isinstance(given, str) and given in TRANSFERS:
        raise ValueError(f"{given} is refused: {TRANSFERS[given]}")


def refuse(given: object, refused: Mapping[str, str]) -> None:
    """Raises ValueError with the reason for the first refused key of a section's unchecked value."""
    for name in given if isinstance(given, dict) else ():
        if name in refused:
            raise ValueError(f"{name} is refused: {refused[name]}")
