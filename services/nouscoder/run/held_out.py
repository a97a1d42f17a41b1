"""Held-out problems that are training problems: their pass@1 says nothing of new problems."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path

from nouscoder.atomic_files import write_whole
from nouscoder.config import Config
from nouscoder.data.problem_index import all_held_out, has_index, open_index
from nouscoder.policy_folder import trained_on


def leak_lines(config: Config, earlier: Iterable[Config] = ()) -> list[str]:
    """What is to be said of held-out problems that this run, its first policy or a stage before is trained on."""
    training = trained_on.trained_on(config.in_run_folder(config.policy.path))
    for each in (*(one for one in earlier if one.run.total_batches), config):
        training = trained_on.joined(training, _training_problems(each))
    return _lines(config, training)


def taught_lines(config: Config, taught: Mapping[str, str]) -> list[str]:
    """What is to be said of held-out problems of which examples are made, where the configuration has any."""
    measures = config.evaluation.problems or config.problems.held_out_share
    return _lines(config, taught) if measures or config.in_run_folder(config.problems.held_out).exists() else []


def note_trained_on(run: Path, config: Config, taught: Mapping[str, str] | None = None) -> None:
    """Write into the run's folder what its policies are trained on: these problems, or those of the training file."""
    if taught is None and (config.run.services == "local" or has_index(config)):
        taught = _training_problems(config)
    known = trained_on.joined(trained_on.trained_on(config.in_run_folder(config.policy.path)), taught or {})
    write_whole(run / trained_on.TRAINED_ON_FILE, json.dumps(known).encode())


def _training_problems(config: Config) -> dict[str, str]:
    with closing(open_index(config)) as index:
        asked = {*index.problem_ids}
        texts = ((name, text) for name, text in index.texts().items() if name in asked)
        return {name: trained_on.digest_of(text.prompt, text.starter_code) for name, text in texts}


def _lines(config: Config, training: Mapping[str, str]) -> list[str]:
    held_out = {one.problem_id: trained_on.digest_of(one.prompt, one.starter_code) for one in all_held_out(config)}
    return trained_on.leak_lines(held_out, training, "held-out problems")
