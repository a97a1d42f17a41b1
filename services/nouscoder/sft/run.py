"""`nouscoder sft`: examples -> fine-tuned policy, as a Hugging Face folder.

    files, run folders -> examples, chosen and encoded -> steps -> the folder model of runs/NAME-sft
                          reading.py                      training.py

The run folder holds config.toml, examples.json (which examples, by digest), metrics.jsonl, checkpoints/, summary.json
and model/. With torchrun each rank runs this module; rank 0 writes.

INVARIANT: a fine-tuning goes on only with the examples that it began with.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from nouscoder.atomic_files import numbered, remove
from nouscoder.config import Config, load_config
from nouscoder.config.tree import NOTHING_GIVEN, Given
from nouscoder.errors import Unusable
from nouscoder.generation.environments.base import EnvironmentUnusable
from nouscoder.learner.parallel.ranks import Ranks
from nouscoder.learner.state.line_file import Line
from nouscoder.policy_folder.inspection import context_tokens
from nouscoder.policy_folder.prompt_file import prompt_lines
from nouscoder.policy_folder.tokenizer import TokenizerError, load_tokenizer
from nouscoder.progress_bar import progress_bar
from nouscoder.run.asked_of_models import adapter_lines
from nouscoder.run.folder import RunChanged, RunFolder, RunFolderError
from nouscoder.run.held_out import note_trained_on, taught_lines
from nouscoder.run.preflight import checked_fine_tuning
from nouscoder.run.resume import Resumed, note_given, resumed, take
from nouscoder.sft.card import fine_tuning_card
from nouscoder.sft.choice import EpochOrder
from nouscoder.sft.encoder import Encoder
from nouscoder.sft.reading import Examples, read_examples
from nouscoder.sft.training import METRICS_FILE, SupervisedTraining, training_config

EXAMPLES_FILE = "examples.json"
_SUFFIX = "-sft"
# Values that a fine-tuning cannot change: which examples there are, in which batches, and what the checkpoints hold.
FIXED_VALUES = (
    *("run.seed", "policy", "sft.train", "sft.validation", "sft.validation_share", "sft.wrong_below"),
    *("sft.max_per_problem", "sft.max_tokens", "sft.batch_size", "sft.out", "generation.environment"),
    *("learner.dtype", "learner.optimizer", "learner.optimizer_states", "learner.lora", "learner.compile"),
    "learner.first_checkpoint",
)


def fine_tune(
    config: Config, *, resume: bool, given: Given = NOTHING_GIVEN, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any] | None:
    """Fine-tune, and return the summary; None on ranks other than 0. Raises NousCoderError with one sentence.

    With `resume` new values of `given` are taken where a fine-tuning can change them; `say` gets them in one line.
    """
    config = config.model_copy(update={"run": config.run.model_copy(update={"name": config.run.name + _SUFFIX})})
    earlier = _resumed(config.run.folder, given) if resume else None
    config = checked_fine_tuning(config) if earlier is None else earlier.config
    learner = config.learner
    ranks = Ranks.join(learner.device, learner.rank_patience_s, learner.context_parallel)
    with ExitStack() as stack:
        stack.callback(ranks.leave)
        if ranks.rank == 0 and not resume:
            RunFolder.refuse_existing(config.run.folder)
        examples = _examples(config)
        sft = config.sft
        order = EpochOrder(len(examples.train), sft.batch_size, sft.epochs, config.run.seed)
        if ranks.rank == 0:
            folder = RunFolder.create(config) if earlier is None else RunFolder.reopen(config.run.folder)[0]
            stack.callback(folder.close)
            _keep(folder, examples, order)
            if earlier is None:
                note_given(folder, given)
            else:
                _take(folder, earlier, given, order, say)
            said = prompt_lines(config.generation.environment, config.in_run_folder(config.policy.path))
            leaks = [*leak_lines(examples), *taught_lines(config, examples.problems)]
            note_trained_on(folder.path, config, examples.problems)
            for line in [*said, *leaks, *adapter_lines(config)]:
                say(line)
        ranks.gather("the run folder is open")
        config = training_config(config, order.num_steps)
        training = _trained(config, examples, order, ranks)
        place = Path(config.sft.out) if config.sft.out else config.run.folder / "model"
        texts = (config.run.folder / METRICS_FILE).read_text(encoding="utf8").splitlines() if ranks.rank == 0 else ()
        lines = [json.loads(text) for text in texts]
        training.write_policy(place, fine_tuning_card(config, examples, lines) if lines else "")
        if ranks.rank:
            return None
        summary = _summary(config, examples, lines, place)
        folder.write_json("summary.json", summary)
        return summary


def leak_lines(examples: Examples) -> list[str]:
    """What is to be said of validation examples whose prompt, token by token, is that of a training example."""
    asked = {one.prompt_token_ids.tobytes() for one in examples.train}
    number = sum(one.prompt_token_ids.tobytes() in asked for one in examples.validation)
    of = f"{number} of {len(examples.validation)} validation examples have the prompt of a training example"
    return [f"warning: {of}: the validation loss counts what is trained on"] if number else []


def _trained(config: Config, examples: Examples, order: EpochOrder, ranks: Ranks) -> SupervisedTraining:
    """The training after its last step."""
    with progress_bar("fine-tuning", order.num_steps) as advance:
        batches = [[examples.train[number] for number in order.at(step)] for step in range(order.num_steps)]
        training = SupervisedTraining(
            *(config, batches, examples.validation, ranks),
            lambda line: advance(1, f"loss {line['loss']:.4f}") if "loss" in line else None,
        )
        advance(training.step)
        with _stopping(training.interrupt):
            training.run()
    return training


def _resumed(path: Path, given: Given) -> Resumed:
    """The fine-tuning in this folder with the new values. Raises RunChanged naming those that it cannot take."""
    if not (path / "config.toml").exists():
        raise RunFolderError(f"there is no fine-tuning to resume in {path}")
    return resumed(path, load_config(path / "config.toml"), given, FIXED_VALUES)


def _take(folder: RunFolder, earlier: Resumed, given: Given, order: EpochOrder, say: Callable[[str], None]) -> None:
    """Put the new values in force. A finished fine-tuning goes on when steps are left. Raises RunChanged."""
    summary = folder.read_json("summary.json")
    if summary is not None and earlier.changes:
        if order.num_steps <= summary["steps"]:
            raise RunChanged(
                f"the fine-tuning in {folder.path} is finished after {summary['steps']} steps:"
                f" {', '.join(earlier.changes)} changes nothing; give more sft.epochs to go on"
            )
        remove(folder.summary_file)  # its model is replaced when the new one is complete
    done = max(numbered(folder.path / "checkpoints"), default=0)
    take(folder, earlier, given, done)
    for line in earlier.lines:
        say(line)


def _examples(config: Config) -> Examples:
    policy = config.in_run_folder(config.policy.path)
    try:
        environment = config.generation.environment
        tokenizer = load_tokenizer(policy, environment.date)
        encoder = Encoder(tokenizer, environment)
    except (TokenizerError, EnvironmentUnusable) as error:
        raise Unusable(f"policy.path: {error}") from error
    return read_examples(config.sft, encoder, tokenizer.vocabulary_size, context_tokens(policy), config.run.seed)


def _keep(folder: RunFolder, examples: Examples, order: EpochOrder) -> None:
    """Record which examples these are, or compare them with the record."""
    record = {
        "digest": examples.digest,
        "train": len(examples.train),
        "validation": len(examples.validation),
        "dropped": examples.dropped,
        "steps": order.num_steps,
    }
    known = folder.read_json(EXAMPLES_FILE)
    if known is None:
        folder.write_json(EXAMPLES_FILE, record)
    elif known["digest"] != record["digest"]:
        raise Unusable(
            f"the examples of {folder.path} are not those that it began with: put the files back, or begin a new run"
        )


@contextmanager
def _stopping(interrupt: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT end the training after the step at hand. Raises ValueError outside of the main thread."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: interrupt()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _summary(config: Config, examples: Examples, lines: list[Line], place: Path) -> dict[str, Any]:
    validation = [line["validation_loss"] for line in lines if "validation_loss" in line]
    return {
        "name": config.run.name,
        "model": str(place),
        "steps": lines[-1]["step"],
        "examples": len(examples.train),
        "validation_examples": len(examples.validation),
        "dropped": examples.dropped,
        "tokens": sum(line.get("tokens", 0) for line in lines),
        "loss": lines[-1]["loss"],
        "validation_loss_before": validation[0] if validation else None,
        "validation_loss": validation[-1] if validation else None,
    }
