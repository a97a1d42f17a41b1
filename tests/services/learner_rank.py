"""Learners of several ranks, each in a process with torchrun's environment variables.

`learner_rank.py WHAT FOLDER` is one rank, for torchrun. Without arguments the script reads lines `["what", "folder",
size]`, forks `size` ranks for each, and prints their exit codes. What: `gradient` writes the gradient of one step to
the folder, `gradient-experts` that of a policy with experts that are replayed, `gradient-stablelm` that of one whose
rows have one sequence each, and with `-context` two ranks share each row; `run` trains the run in the folder, with a
broker in a file; `die` is `run` in which the last rank is killed in the third batch, `die0` one in which rank 0 is, and
`hang` one in which the last rank stops without an end: each only once in a folder. With `-group` a single rank is a
group, with `-cuda` it computes on a GPU. A key of KINDS may follow, as in
`run-8bit`. A run begins with first.checkpoint of its folder if it is there. The parent process has imported torch but
computed nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn
from unittest import mock

import torch
from learner_process import FileBroker  # type: ignore[import-not-found]
from model_types import tiny_model  # type: ignore[import-not-found]
from prometheus_client import CollectorRegistry
from tests.policies_with_experts import random_policy_with_experts, with_random_experts
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nouscoder.config import Config, GenerationSection, LearnerSection, PolicySection, RunSection
from nouscoder.domain.batch import Batch
from nouscoder.domain.policy import Transport
from nouscoder.errors import NousCoderError
from nouscoder.learner.core import LearnerCore
from nouscoder.learner.follower import RankFollower
from nouscoder.learner.loading import prepare_thread
from nouscoder.learner.metrics.prometheus import LearnerMetrics
from nouscoder.learner.metrics.step import TrainedBatch
from nouscoder.learner.model.packed_attention import attend_packed
from nouscoder.learner.model.synthetic import (
    random_batch,
    random_policy,
)
from nouscoder.learner.parallel import ranks as ranks_module
from nouscoder.learner.parallel.process_rank import ProcessRank
from nouscoder.learner.parallel.rank_messages import RankMessage
from nouscoder.learner.parallel.ranks import Ranks, whole
from nouscoder.learner.state.run_log import BatchSeconds
from nouscoder.learner.trainer import Trainer
from nouscoder.learner.worker import LearnerWorker

NUM_BATCHES, DEADLY_BATCH = 4, 2
KINDS: dict[str, dict[str, object]] = {
    "bf16": {"dtype": "bfloat16"},
    "lora": {"lora": {"rank": 4}},
    "adapter": {"lora": {"rank": 4, "publication": "adapter"}},
    "8bit": {"optimizer_states": "8bit"},
    "deltas": {"policy_deltas": True},
    "cpu": {"optimizer_states": "cpu"},
}
PATIENCE_S = {"hang": 20.0}  # else 120


def kind_of(what: str) -> dict[str, object]:
    """The settings of the kind at the end of `what`."""
    return KINDS.get(what.rpartition("-")[2], {})


def gradient_of_a_step(what: str, ranks: Ranks) -> dict[str, torch.Tensor]:
    """The gradient of a step over one batch, by weight, and its metrics."""
    prepare_thread(1)
    tokens = 200 if ranks.row else 64
    settings = LearnerSection.model_validate(
        {"steps_per_batch": 1, "max_gradient_norm": 1e9, "microbatch_tokens": tokens, **kind_of(what)}
    )
    settings = settings.model_copy(update={"entropy": settings.entropy.model_copy(update={"coefficient": 0.1})})
    config, batch = Config(learner=settings), random_batch(0, seed=1, num_groups=3, group_size=3)
    policy: PreTrainedModel = random_policy(0)
    if "experts" in what:
        policy = random_policy_with_experts(0)
        batch = with_random_experts(batch, policy, seed=2)
        config = Config(learner=settings, policy=PolicySection(router_replay=True))
    if "stablelm" in what:
        policy = tiny_model("stablelm", std=0.1)
        attend_packed(policy)
    trainer = Trainer(policy, config, ranks=ranks)
    trainer.admit()
    (step,) = trainer.train_batch(batch).steps
    gradients = {name: whole(p.grad) for name, p in trainer.model.named_parameters() if p.grad is not None}
    figures = {name: torch.tensor(value) for name, value in step.diagnostics.items()}
    return {**gradients, **figures, "loss": torch.tensor(step.loss), "norm": torch.tensor(step.gradient_norm)}


def config_of(what: str, root: Path) -> Config:
    """Two steps a batch, and a checkpoint after each batch."""
    settings = {
        "steps_per_batch": 2,
        "learning_rate": 1e-4,
        "peak_flops": 1e9,
        "checkpoint_every_batches": 1,
        "microbatch_tokens": 64,
        "rank_patience_s": PATIENCE_S.get(what, 120.0),
        **kind_of(what),
        "device": "cuda" if "cuda" in what else "cpu",
    }
    if (first := root / "first.checkpoint").exists():
        settings["first_checkpoint"] = str(first)
    learner = LearnerSection.model_validate(settings)
    generation = GenerationSection(policy_from=Transport.LEARNER if learner.policy_deltas else Transport.FOLDER)
    run = RunSection(root=root, seed=5, total_batches=NUM_BATCHES)
    return Config(run=run, learner=learner, generation=generation)


async def train(config: Config, core: LearnerCore) -> None:
    """Rank 0 trains the run's batches."""
    broker = FileBroker(config.run.folder / "broker")
    worker = LearnerWorker(config, broker, LearnerMetrics(CollectorRegistry()), core)
    try:
        await worker.run()
    finally:
        await worker.close()


def strike(config: Config, number: signal.Signals) -> None:
    """Send the signal to this process, once in a run folder."""
    mark = config.run.folder / "struck"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), number)


class StruckFollower(RankFollower):
    """Gets the signal when it is told to train on DEADLY_BATCH. By then a checkpoint is complete."""

    signal = signal.SIGKILL

    def _train(self, command: RankMessage) -> None:
        if command.number == DEADLY_BATCH:
            self._finish_saving()
            strike(self._config, self.signal)
        super()._train(command)


class NotingFollower(RankFollower):
    """Adds to the file `publications` how it took part in each."""

    def _note(self, what: str) -> None:
        with (self._config.run.folder / "publications").open("a") as file:
            file.write(f"{what}\n")

    def _publish(self, message: RankMessage) -> None:
        self._note("by ranks")
        super()._publish(message)

    def _gather(self, message: RankMessage) -> None:
        self._note("gathered")
        super()._gather(message)


class HangingFollower(StruckFollower):
    """Stops as if it hung."""

    signal = signal.SIGSTOP


class DeadlyCore(LearnerCore):
    """Is killed before it trains on DEADLY_BATCH."""

    def train(self, batch: Batch, seconds: BatchSeconds | None = None) -> TrainedBatch:
        """See LearnerCore."""
        if batch.batch_id == DEADLY_BATCH:
            strike(self._config, signal.SIGKILL)
        return super().train(batch, seconds)


def main(what: str, folder: Path) -> None:
    """Do it as the rank that the environment names."""
    config = config_of(what, folder)
    if "group" in what:  # the learner takes a size of 1 for no group
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        mock.patch.object(ranks_module, "process_rank", return_value=ProcessRank(0, 1, 0, address, port)).start()
    shared = 2 if "context" in what else 1
    ranks = Ranks.join(config.learner.device, config.learner.rank_patience_s, shared)
    if what.startswith("gradient"):
        gradient = gradient_of_a_step(what, ranks)
        if ranks.rank == 0:
            torch.save(gradient, folder / f"{what}{ranks.size}.pt")
    elif ranks.rank:
        is_last = ranks.rank == ranks.size - 1
        follower = (
            {"die": StruckFollower, "hang": HangingFollower}.get(what.partition("-")[0], NotingFollower)
            if is_last
            else RankFollower
        )
        follower(config, ranks).run()
    else:
        core = DeadlyCore(config, ranks) if what.startswith("die0") else LearnerCore(config, ranks)
        asyncio.run(train(config, core))
        is_wrapped = any(isinstance(weight, DTensor) for weight in core.model.parameters())
        (folder / "wrapped.txt").write_text(str(is_wrapped))
    ranks.leave()


def run_rank(what: str, folder: Path) -> NoReturn:
    """Do it and exit. The output is added to the file rank<RANK>.log in the folder."""
    code = 1
    try:
        with (folder / f"rank{os.environ['RANK']}.log").open("a") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        main(what, folder)
        code = 0
    except NousCoderError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def fork_rank(what: str, folder: Path, environment: dict[str, str]) -> int:
    """Fork a rank. Returns its process id."""
    child = os.fork()
    if not child:
        os.environ.update(environment)
        run_rank(what, folder)
    return child


def start(what: str, folder: Path, size: int) -> list[int]:
    """Fork the ranks of a learner and wait for them. Returns their exit codes, negative for signals."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    variables = [{**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    children = [fork_rank(what, folder, own) for own in variables]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__" and len(sys.argv) > 1:
    run_rank(sys.argv[1], Path(sys.argv[2]))
elif __name__ == "__main__":
    for line in sys.stdin:
        asked, place, count = json.loads(line)
        print(json.dumps(start(asked, Path(place), count)), flush=True)
