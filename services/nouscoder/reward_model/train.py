"""Bradley-Terry training of a reward model on preference pairs (Bradley and Terry 1952; AceCoder, arXiv 2502.01718).

The loss of a pair is -log sigmoid(score of the chosen - score of the rejected answer).

INVARIANT: the trained weights depend, bit for bit, only on the policy, the pairs and the settings. Every
`save_every_steps` steps the state is saved beside the output; a training that was killed goes on from there and ends
with the same weights. The output appears complete or not at all.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.nn.functional import logsigmoid
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import PreTrainedModel

from nouscoder.atomic_files import lock_file, naming_storage_faults, whole_file, whole_folder, whole_or_gone
from nouscoder.errors import NousCoderError, Unusable
from nouscoder.learner.model.packing import plan
from nouscoder.policy_folder.compose import CONFIG_FILE
from nouscoder.progress_bar import Advance, progress_bar
from nouscoder.reward_model.model import AnswerEncoder, new_reward_model, row_scores
from nouscoder.reward_model.pairs import PairBody

Encoded = tuple[list[int], list[int]]  # token ids of the chosen and of the rejected answer

_TOKENIZER_SUFFIXES = {".json", ".txt", ".model", ".jinja"}


class RewardTrainingFailed(NousCoderError):
    """Training cannot continue. The message names the step."""


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """How a reward model is trained. `max_tokens`: of prompt and answer; `row_tokens`: of a packed row.

    The learning rate rises linearly for `warmup_share` of the steps, then falls linearly to 0. AceCoder's report gives
    no such numbers in our survey, so all are ours.
    """

    epochs: int = 1
    pairs_per_step: int = 64
    learning_rate: float = 1e-5
    warmup_share: float = 0.05
    weight_decay: float = 0.0
    max_gradient_norm: float = 1.0
    max_tokens: int = 4096
    row_tokens: int = 16_384
    seed: int = 0
    save_every_steps: int = 50
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class TrainedRewardModel:
    """The result. `loss` and `accuracy` are means over the pairs of the last tenth of the steps."""

    steps: int
    pairs: int
    loss: float
    accuracy: float

    def text(self, out: Path) -> str:
        """A line for people."""
        return (
            f"{out}: {self.steps} steps on {self.pairs} pairs; at the end loss {self.loss:.4f}, the chosen answer has"
            f" the higher score in {self.accuracy:.1%} of the pairs"
        )


def train_reward_model(
    policy: Path, pairs: Sequence[PairBody], out: Path, settings: TrainingSettings
) -> TrainedRewardModel:
    """Write a reward model to the folder `out`. Raises Unusable, RewardTrainingFailed and StorageError."""
    if out.exists():
        raise Unusable(f"{out} exists already: give another --out, or delete it")
    held = out.with_name(f"{out.name}.lock")
    with whole_or_gone(held), ExitStack() as stack:
        with naming_storage_faults(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_file(held, f"another command trains {out}"))
        encode = AnswerEncoder(policy, settings.max_tokens)
        encoded = [(encode(pair.prompt, pair.chosen), encode(pair.prompt, pair.rejected)) for pair in pairs]
        model = new_reward_model(policy).to(settings.device)  # type: ignore[arg-type]
        model.config.pad_token_id = encode.tokenizer.pad_id
        state = out.with_name(f"{out.name}.state")
        training = _Training(model, encoded, settings, state, _identity(policy, pairs, settings))
        trained = training.run()
        with whole_folder(out) as part:
            for file in sorted(policy.iterdir()):
                is_configuration = file.name == CONFIG_FILE or file.name.endswith(".index.json")
                if file.suffix in _TOKENIZER_SUFFIXES and not is_configuration and file.is_file():
                    (part / file.name).write_bytes(file.read_bytes())
            model.save_pretrained(part)
        training.forget()
        return trained


def _identity(policy: Path, pairs: Sequence[PairBody], settings: TrainingSettings) -> str:
    """A digest of what the weights depend on, so that a state is continued only by the same training."""
    digest = hashlib.sha256((policy / CONFIG_FILE).read_bytes())
    digest.update(json.dumps([str(policy.resolve()), asdict(settings)]).encode())
    for pair in pairs:
        digest.update(pair.model_dump_json().encode())
    return digest.hexdigest()


class _Training:
    """The steps of one training, and its state in the file `state`."""

    def __init__(
        self, model: PreTrainedModel, pairs: Sequence[Encoded], settings: TrainingSettings, state: Path, identity: str
    ) -> None:
        self._model = model
        self._pairs = pairs
        self._settings = settings
        self._state = state
        self._identity = identity
        self._optimizer = AdamW(
            model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=settings.weight_decay, foreach=True
        )
        self._steps = list(_steps(len(pairs), settings))
        self._history: list[tuple[int, float, float]] = []  # pairs, sum of losses and of wins of each step

    def run(self) -> TrainedRewardModel:
        """Do all steps that are left. Raises RewardTrainingFailed."""
        self._resume()
        self._model.train()
        with progress_bar("training", len(self._steps)) as advance:
            advance(len(self._history))
            for number in range(len(self._history), len(self._steps)):
                self._history.append(self._step(number))
                self._report(advance)
                if (number + 1) % self._settings.save_every_steps == 0:
                    state = {
                        "identity": self._identity,
                        "history": self._history,
                        "model": self._model.state_dict(),
                        "optimizer": self._optimizer.state_dict(),
                    }
                    with whole_file(self._state) as file:
                        torch.save(state, file)
        self._model.train(False)
        count, loss, wins = self._last(max(1, len(self._steps) // 10))
        return TrainedRewardModel(len(self._steps), len(self._pairs), loss / count, wins / count)

    def forget(self) -> None:
        """Remove the state, which the output makes useless."""
        self._state.unlink(missing_ok=True)

    def _step(self, number: int) -> tuple[int, float, float]:
        chosen = [self._pairs[place] for place in self._steps[number]]
        total, wins = 0.0, 0.0
        for row in plan([len(better) + len(worse) for better, worse in chosen], self._settings.row_tokens):
            answers = [ids for place in row for ids in chosen[place]]
            better, worse = row_scores(self._model, answers).view(-1, 2).unbind(1)
            loss = -logsigmoid(better - worse).sum()
            torch.autograd.backward(loss / len(chosen))
            total += loss.item()
            wins += (better > worse).sum().item()
        norm = clip_grad_norm_(self._model.parameters(), self._settings.max_gradient_norm).item()
        if not math.isfinite(total) or not math.isfinite(norm):
            raise RewardTrainingFailed(f"step {number}: the loss is {total} and the gradient's norm {norm}")
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate * _rate(number, len(self._steps), self._settings.warmup_share)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return len(chosen), total, wins

    def _report(self, advance: Advance) -> None:
        count, loss, wins = self._last(10)
        advance(1, f"loss {loss / count:.4f} accuracy {wins / count:.3f}")

    def _last(self, num_steps: int) -> tuple[int, float, float]:
        counts, losses, wins = zip(*self._history[-num_steps:], strict=True)
        return sum(counts), math.fsum(losses), math.fsum(wins)

    def _resume(self) -> None:
        """Load the state of the same training, if there is one. That of another one is an error."""
        if not self._state.exists():
            return
        state: dict[str, Any] = torch.load(self._state, weights_only=True, map_location=self._settings.device)
        if state["identity"] != self._identity:
            raise Unusable(f"{self._state} is of another training: finish it, or delete the file")
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._history = [(count, loss, wins) for count, loss, wins in state["history"]]


def _steps(num_pairs: int, settings: TrainingSettings) -> list[list[int]]:
    """The places of the pairs of each step: each epoch has all pairs once, in an order of its own."""
    steps = []
    for epoch in range(settings.epochs):
        order = Random(f"{settings.seed}/{epoch}").sample(range(num_pairs), num_pairs)
        steps += [order[at : at + settings.pairs_per_step] for at in range(0, num_pairs, settings.pairs_per_step)]
    return steps


def _rate(step: int, num_steps: int, warmup_share: float) -> float:
    warmup = max(1, round(warmup_share * num_steps))
    return min((step + 1) / warmup, (num_steps - step) / max(1, num_steps - warmup), 1.0)
