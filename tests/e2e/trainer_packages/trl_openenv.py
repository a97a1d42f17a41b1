"""Trains a tiny policy for 2 steps with TRL's environment_factory, which holds a client of OpenEnv.

The policy calls the tool `submit` with a right or a wrong program. The hidden tests of problem 1 are lost, so its
rollouts have no reward. Prints {"version": ..., "rollouts": [[problem, reward, advantage]], "steps": [gradient norm]}.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from openenv.core.generic_client import GenericEnvClient
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

GROUP = 8
PROGRAMS = ("print(sum(map(int, input().split())))", "print(-1)")
CALLS = tuple(
    f"<tool_call>\n{json.dumps({'name': 'submit', 'arguments': {'answer': program}})}\n</tool_call>"
    for program in PROGRAMS
)
URL = sys.argv[1]


class Programming:
    def __init__(self) -> None:
        self._session = GenericEnvClient(base_url=URL).sync()

    def reset(self, index: int, **row: object) -> str:
        self._reward: float | None = 0.0
        self._done = False
        return str(self._session.reset(index=index).observation["prompt"])

    def submit(self, answer: str) -> str:
        """Test a program.

        Args:
            answer: The program.
        """
        if self._done:
            return "The task has ended."
        try:
            result = self._session.step({"answer": answer})
        except Exception:  # TRL shows errors to the policy. None: this rollout has no reward.
            self._reward, self._done = None, True
            raise
        self._reward, self._done = result.reward, result.done
        return str(result.observation["feedback"] or result.observation["verdict"])

    def get_reward(self) -> float | None:
        return self._reward


def save_policy(folder: Path) -> Path:
    """A model that answers with one of the calls and ends its turn; its tokens are whole texts."""
    plain = Tokenizer(WordLevel({"<pad>": 0, "<unk>": 1}, unk_token="<unk>"))
    words = ("<|im_start|>", "<|im_end|>", *CALLS)
    plain.add_tokens([AddedToken(word, normalized=False, special=word.startswith("<|")) for word in words])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=plain, pad_token="<pad>", eos_token="<|im_end|>", unk_token="<unk>"
    )
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    tokenizer.save_pretrained(folder)
    size = 16
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=size, intermediate_size=size, num_hidden_layers=1,
        num_attention_heads=2, pad_token_id=0, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    calls = tokenizer.convert_tokens_to_ids(list(CALLS))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.mul_(0.01)
        model.model.embed_tokens.weight[:, 0] = 1.0  # after any other token comes a call
        model.model.embed_tokens.weight[calls, 0] = 0.0
        model.model.embed_tokens.weight[calls, 1] = 1.0  # after a call, the end of the turn
        model.lm_head.weight[calls, 0] = 3.0
        model.lm_head.weight[tokenizer.eos_token_id, 1] = 3.0
    model.save_pretrained(folder)
    return folder


class Recorder(GRPOTrainer):  # type: ignore[misc]
    """Notes (problem, reward, advantage) of each rollout."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.noted: list[tuple[int, float | None, float]] = []

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
        rewards = [environment.get_reward() for environment in self.environments]
        indices = [row["index"] for row in inputs]
        self.noted += zip(indices, rewards, scored["advantages"].tolist(), strict=True)
        return scored


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, max_steps=2, per_device_train_batch_size=2 * GROUP, num_generations=GROUP,
            max_completion_length=64, max_tool_calling_iterations=2, logging_steps=1, report_to=[], use_cpu=True,
            bf16=False, seed=0, save_strategy="no",
        )  # fmt: skip
        prompt = [{"role": "user", "content": "Solve the task."}]
        rows = [{"prompt": prompt, "index": index} for index in range(2)]
        trainer = Recorder(
            model=str(save_policy(Path(folder) / "policy")),
            args=config,
            train_dataset=Dataset.from_list(rows),
            environment_factory=Programming,
        )
        trainer.train()
    steps = [line["grad_norm"] for line in trainer.state.log_history if "reward" in line]
    found = {"version": importlib.metadata.version("trl"), "rollouts": trainer.noted, "steps": steps}
    print(json.dumps(found))


main()
