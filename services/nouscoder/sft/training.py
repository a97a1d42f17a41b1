"""Supervised fine-tuning of one policy: one optimizer step for each batch of examples, with the learner's trainer.

Every rank runs the same loop on the same batches; rank 0 writes. The run folder holds metrics.jsonl (a line for each
step, and one of step 0 with the first validation loss) and checkpoints/.

INVARIANT: the weights after each step depend, bit for bit, only on the first policy, the configuration and the batches.
A training that is killed at any point and started again ends with the weights, and apart from times with the lines of
metrics.jsonl, of one that was never killed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from nouscoder.config import Config, DecayKind, PolicySection, ScheduleSection
from nouscoder.domain.rollout import Rollout
from nouscoder.errors import NousCoderError, Unusable
from nouscoder.learner.loading import prepare_thread, trainer_at
from nouscoder.learner.model.weights import stored_dtypes
from nouscoder.learner.parallel.ranks import Ranks, naming_lost_ranks
from nouscoder.learner.publication.publisher import PolicyPublisher, StagedPolicy
from nouscoder.learner.state.checkpoint_store import CheckpointStore, Progress, begin_part
from nouscoder.learner.state.first_policy import require_first_policy
from nouscoder.learner.state.line_file import Line, LineFile
from nouscoder.learner.state.run_files import RunFiles
from nouscoder.learner.trainer import TrainingInterrupted
from nouscoder.objectives.advantage import AdvantageSection
from nouscoder.objectives.base import LossInputs, MinibatchCounts, Needs, ObjectiveTerms
from nouscoder.policy_folder.compose import compose_policy
from nouscoder.policy_folder.prompt_file import trained_prompt
from nouscoder.sft.rollouts import batch_of

METRICS_FILE = "metrics.jsonl"


class Stopped(NousCoderError):
    """The training was told to stop. What is done is in a checkpoint."""


class Supervised:
    """The objective: the mean negative log-likelihood of the examples' own tokens.

    With N loss tokens in the minibatch, L = -1/N sum_t log pi_theta(o_t). Tokens given to the policy are no loss
    tokens. Advantages, rewards and recorded log-probabilities do not matter.
    """

    needs = Needs()

    def __call__(self, inputs: LossInputs, counts: MinibatchCounts) -> ObjectiveTerms:
        """The share of this micro-batch in the minibatch's mean."""
        return ObjectiveTerms(-inputs.logprobs.sum() / counts.num_tokens)


def training_config(config: Config, num_steps: int) -> Config:
    """The configuration of the trainer: [sft] replaces what [learner] says of the learning rate and of batches."""
    sft = config.sft
    warmup = min(math.ceil(sft.schedule.warmup_share * num_steps), num_steps - 1)
    schedule = ScheduleSection(warmup_steps=warmup)
    if sft.schedule.decay is DecayKind.COSINE:
        floor = sft.schedule.floor
        schedule = ScheduleSection(warmup_steps=warmup, decay=DecayKind.COSINE, decay_steps=num_steps, floor=floor)
    changes = {
        "learning_rate": sft.learning_rate,
        "weight_decay": sft.weight_decay,
        "adam_betas": sft.adam_betas,
        "schedule": schedule,
        "steps_per_batch": 1,
        "samples_per_batch": 0,
        "advantage": AdvantageSection(),
    }
    learner = config.learner.model_copy(update=changes)
    policy = PolicySection(path=config.policy.path)
    return config.model_copy(update={"learner": learner, "policy": policy})


class SupervisedTraining:
    """One fine-tuning, in the run folder of `config`, which is one of `training_config`. Hold the folder's lock.

    One step is taken on each of the `batches`. `on_line` gets each line of metrics.jsonl on rank 0. All methods but
    `interrupt` are for one thread.
    """

    def __init__(
        self,
        config: Config,
        batches: Sequence[Sequence[Rollout]],
        validation: Sequence[Rollout] = (),
        ranks: Ranks | None = None,
        on_line: Callable[[Line], None] = lambda line: None,
    ) -> None:
        """Load the newest undamaged checkpoint, or the first policy. Raises Unusable and CheckpointError."""
        self._config = config
        self._batches = batches
        self._validation = validation
        self._ranks = ranks or Ranks()
        self._on_line = on_line
        self._files = RunFiles.of(config)
        self._store = CheckpointStore(self._files.checkpoints, config.learner.keep_checkpoints)
        self._log = LineFile(config.run.folder / METRICS_FILE, lambda line: line["step"])
        self._saved_at = time.monotonic()
        prepare_thread(config.learner.threads)
        torch.manual_seed(config.run.seed)
        with naming_lost_ranks(self._ranks.patience_s):
            found = self._store.newest() if self._is_first else None
            step = self._ranks.gather(0 if found is None else found.progress.step)[0]
            checkpoint = found if self._is_first or not step else self._store.at_step(step)
            self.trainer = trainer_at(config, checkpoint, self._ranks, Supervised())
        self._progress = Progress() if checkpoint is None else checkpoint.progress
        self._saved_step = self._progress.step
        if self._progress.step > len(batches):
            raise Unusable(
                f"{config.run.folder} has a checkpoint of step {self._progress.step}, but there are only"
                f" {len(batches)} steps: give the run another name"
            )
        if self._is_first:
            self._log.open(self._progress.step)
            require_first_policy(config, reads_weights_again=config.learner.lora.rank > 0)

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.trainer.step

    def interrupt(self) -> None:
        """Make `run` stop before its next step. For signal handlers and other threads."""
        self.trainer.interrupt()

    def run(self) -> None:
        """Train all steps that are left. Raises Stopped, TrainingError, StorageError and RankLost."""
        with naming_lost_ranks(self._ranks.patience_s):
            if not self.step and self._validation:
                loss = self.trainer.mean_loss(self._validation)
                self._write({"step": 0, "validation_loss": loss, "time": time.time()})
            while self.step < len(self._batches):
                try:
                    self._train_step()
                except TrainingInterrupted:
                    self._save()
                    raise Stopped(f"stopped after step {self.step}: go on with --resume") from None
                if self._is_due():
                    self._save()

    def write_policy(self, to: Path, card: str) -> None:
        """Write the policy as a new Hugging Face folder. All ranks must call it. Raises StorageError."""
        first, learner = self._files.policy, self._config.learner
        with naming_lost_ranks(self._ranks.patience_s):
            staged = StagedPolicy.of(self.trainer.model, self.step, self.step, stored_dtypes(first), first)
        if self._is_first:
            publisher = PolicyPublisher(self._files.policies, 1, shard_bytes=learner.policy_shard_bytes)
            weights = Path(publisher.write(staged).folder)
            prompt, run = trained_prompt(self._config), self._config.run.folder
            compose_policy(to, first, weights, prompt=prompt, card=card, trained=run, link=True)

    @property
    def _is_first(self) -> bool:
        return self._ranks.rank == 0

    def _train_step(self) -> None:
        examples = self._batches[self.step]
        trained = self.trainer.train_batch(batch_of(self.step, examples))
        (step,) = trained.steps
        done = self._progress
        self._progress = Progress(step.step, step.step - 1, done.rollouts + len(examples))
        line: Line = {
            "step": step.step,
            "loss": step.loss,
            "skipped": step.skipped,
            "gradient_norm": step.gradient_norm,
            "learning_rate": step.learning_rate,
            "examples": len(examples),
            "tokens": step.num_tokens,
            "tokens_per_second": trained.tokens_per_second,
            "time": time.time(),
        }
        is_last = step.step == len(self._batches)
        if self._validation and (is_last or step.step % self._config.sft.validate_every_steps == 0):
            line["validation_loss"] = self.trainer.mean_loss(self._validation)
        self._write(line)

    def _write(self, line: Line) -> None:
        if self._is_first:
            self._log.append([line])
            self._on_line(line)

    def _is_due(self) -> bool:
        """Whether to write a checkpoint now: rank 0's clock decides, and after the last step there is always one."""
        learner = self._config.learner
        is_late = time.monotonic() - self._saved_at >= learner.checkpoint_every_s
        if self.step % learner.checkpoint_every_batches == 0 or self.step == len(self._batches):
            return True
        return bool(self._ranks.gather(is_late)[0])

    def _save(self) -> None:
        """Write a checkpoint and wait until it is durable. All ranks take part."""
        if self._progress.step == self._saved_step:
            return
        if self._is_first:
            self._store.begin(self.trainer, self._progress, self._tell).finish()
            self._store.prune()
        else:
            begin_part(self.trainer, Path(self._ranks.gather("")[0])).wait()
        self._saved_at, self._saved_step = time.monotonic(), self._progress.step

    def _tell(self, folder: Path) -> None:
        self._ranks.gather(str(folder))
