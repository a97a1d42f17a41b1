"""The model card: README.md of a fine-tuned policy's folder. It says only what the run recorded."""

from __future__ import annotations

from collections.abc import Sequence

from nouscoder.config import Config
from nouscoder.learner.state.line_file import Line
from nouscoder.policy_folder.prompt_file import trained_prompt
from nouscoder.run.model_card import LIMITS, base_model, heading, prompt_section, table
from nouscoder.sft.reading import Examples


def fine_tuning_card(config: Config, examples: Examples, lines: Sequence[Line]) -> str:
    """Markdown. `config` is that of the trainer, `lines` are those of metrics.jsonl."""
    base = base_model(config.in_run_folder(config.policy.path))
    return "\n".join(
        (
            *heading(config.run.name),
            f"Trained with NousCoder by supervised fine-tuning from {base}, {lines[-1]['step']} optimizer steps.",
            "",
            "## Examples",
            *_example_lines(config, examples),
            "",
            "## Loss",
            *_losses(lines),
            "",
            "## Training",
            *table(_settings(config)),
            "",
            *prompt_section(trained_prompt(config)),
            *LIMITS,
        )
    )


def _example_lines(config: Config, examples: Examples) -> list[str]:
    dropped = "".join(f", {count} dropped as {reason.replace('_', ' ')}" for reason, count in examples.dropped.items())
    return [
        f"{len(examples.train)} for training, {len(examples.validation)} for validation{dropped}.",
        "",
        *(f"- {path.name}" for path in config.sft.train),
        "",
        f"SHA-256 of their tokens: `{examples.digest}`",
    ]


def _losses(lines: Sequence[Line]) -> list[str]:
    """The mean negative log-likelihood of an answer's token, in nats."""
    validation = [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]
    sentence = f"Nats per token of the answers; {lines[-1]['loss']:.4f} on the last batch."
    if not validation:
        return [sentence]
    rows = (f"| {step} | {loss:.4f} |" for step, loss in validation)
    return [sentence, "", "| step | validation |", "|---|---|", *rows]


def _settings(config: Config) -> dict[str, object]:
    sft, learner = config.sft, config.learner
    return {
        "epochs": sft.epochs,
        "examples of a step": sft.batch_size,
        "optimizer": learner.optimizer.value,
        "learning rate": f"{learner.learning_rate:g}",
        "warm-up steps": learner.schedule.warmup_steps,
        "decay": learner.schedule.decay.value,
        "wrong answers for problems with a pass rate below": f"{sft.wrong_below:g}",
        "seed": config.run.seed,
    }
