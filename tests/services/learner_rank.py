"""Learners of several ranks, each in a process with torchrun's environment variables.

As a script it reads lines `["what", "folder", size]`, forks `size` ranks for each, and prints their exit codes. What:
`gradient` writes the gradient of one step to the folder; `run` trains the run in the folder, with a broker in a file;
`die` is `run` in which the last rank is killed in the third batch. The parent process has imported torch but computed
nothing.
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

import torch
from learner_process import FileBroker  # type: ignore[import-not-found]
from prometheus_client import CollectorRegistry

from nouscoder.config import Config, LearnerSection, RunSection
from nouscoder.errors import NousCoderError
from nouscoder.learner.commands import Command
from nouscoder.learner.core import LearnerCore, prepare_thread
from nouscoder.learner.follower import Follower
from nouscoder.learner.metrics import LearnerMetrics
from nouscoder.learner.ranks import Ranks, whole
from nouscoder.learner.synthetic import random_batch, random_policy
from nouscoder.learner.trainer import Trainer
from nouscoder.learner.worker import LearnerWorker

NUM_BATCHES, PATIENCE_S, DEADLY_BATCH = 4, 120.0, 2


def gradient_of_a_step(ranks: Ranks) -> dict[str, torch.Tensor]:
    """The gradient of a step over one batch, by weight, and its metrics."""
    prepare_thread(1)
    settings = LearnerSection(steps_per_batch=1, max_gradient_norm=1e9, microbatch_tokens=64)
    settings = settings.model_copy(update={"entropy": settings.entropy.model_copy(update={"coefficient": 0.1})})
    trainer = Trainer(random_policy(0), Config(learner=settings), ranks=ranks)
    (step,) = trainer.train_batch(random_batch(0, seed=1, num_groups=3, group_size=3)).steps
    gradients = {name: whole(p.grad) for name, p in trainer.model.named_parameters() if p.grad is not None}
    figures = {name: torch.tensor(value) for name, value in step.diagnostics.items()}
    return {**gradients, **figures, "loss": torch.tensor(step.loss), "norm": torch.tensor(step.gradient_norm)}


def config_of(root: Path) -> Config:
    """Two steps a batch, and a checkpoint after each batch."""
    learner = LearnerSection(
        steps_per_batch=2,
        learning_rate=1e-4,
        peak_flops=1e9,
        checkpoint_every_batches=1,
        microbatch_tokens=64,
        rank_patience_s=PATIENCE_S,
    )
    return Config(run=RunSection(root=root, seed=5, total_batches=NUM_BATCHES), learner=learner)


async def train(config: Config, ranks: Ranks) -> None:
    """Rank 0 trains the run's batches."""
    broker = FileBroker(config.run.folder / "broker")
    worker = LearnerWorker(config, broker, LearnerMetrics(CollectorRegistry()), LearnerCore(config, ranks))
    try:
        await worker.run()
    finally:
        await worker.close()


class DeadlyFollower(Follower):
    """Is killed when it is told to train on DEADLY_BATCH. By then a checkpoint is complete."""

    def _train(self, command: Command) -> None:
        if command.number == DEADLY_BATCH:
            self._finish_saving()
            os.kill(os.getpid(), signal.SIGKILL)
        super()._train(command)


def main(what: str, folder: Path) -> None:
    """Do it as the rank that the environment names."""
    ranks = Ranks.join("cpu", PATIENCE_S)
    if what == "gradient":
        gradient = gradient_of_a_step(ranks)
        if ranks.rank == 0:
            torch.save(gradient, folder / f"gradient{ranks.size}.pt")
    elif ranks.rank:
        kind = DeadlyFollower if what == "die" and ranks.rank == ranks.size - 1 else Follower
        kind(config_of(folder), ranks).run()
    else:
        asyncio.run(train(config_of(folder), ranks))
    ranks.leave()


def _as_rank(what: str, folder: Path, environment: dict[str, str]) -> int:
    """Fork a rank. Its output goes to the file rank<RANK>.log in the folder. Returns its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ.update(environment)
        with (folder / f"rank{environment['RANK']}.log").open("w") as output:
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


def start(what: str, folder: Path, size: int) -> list[int]:
    """Fork the ranks of a learner and wait for them. Returns their exit codes, negative for signals."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    children = [_as_rank(what, folder, {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(size)]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    for line in sys.stdin:
        asked, place, count = json.loads(line)
        print(json.dumps(start(asked, Path(place), count)), flush=True)
