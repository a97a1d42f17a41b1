"""The model card: README.md of an exported folder, from configuration and evaluations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from nouscoder.config import Config
from nouscoder.domain.plan import Evaluated
from nouscoder.domain.prompt import PromptSettings
from nouscoder.objectives.entry_point import EntryPointObjective
from nouscoder.policy_folder.prompt_file import PROMPT_FILE, trained_prompt


def model_card(
    name: str,
    config: Config,
    version: int,
    evaluations: Sequence[Evaluated],
    base: str,
    *,
    adapter: bool = False,
) -> str:
    """Markdown with Hugging Face's metadata, of what the run recorded. `adapter`: the folder has one of `base`."""
    return "\n".join(
        (
            *heading(f"{name}, version {version}", adapter_of=base if adapter else ""),
            f"Trained with NousCoder by reinforcement learning from {base}: version {version} is the policy after"
            f" {version} batches ({version * config.learner.steps_per_batch} optimizer steps) of run"
            f" `{name}`.",
            *([f"This folder holds only a low-rank adapter (LoRA) of {base}."] if adapter else []),
            "",
            *_evaluation_lines(config, version, evaluations),
            "## Training",
            *table(_settings(config)),
            "",
            *prompt_section(trained_prompt(config)),
            *LIMITS,
        )
    )


def prompt_section(prompt: PromptSettings) -> list[str]:
    """How to ask the policy."""
    return [
        "## Prompt",
        f"{prompt.described}. `{PROMPT_FILE}` has the whole description; NousCoder's commands read it:",
        "",
        *table(asdict(prompt)),
        "",
    ]


LIMITS = ("## Limits", "The programs that this model writes are not checked: run them in a sandbox.", "")


def heading(title: str, *, adapter_of: str = "") -> list[str]:
    """The metadata that Hugging Face reads, and the title. `adapter_of`: the base of an adapter; empty for weights."""
    library = {"library_name": "peft", "base_model": adapter_of} if adapter_of else {"library_name": "transformers"}
    metadata = {**library, "pipeline_tag": "text-generation", "tags": ["code", "nouscoder"]}
    head = "".join(f"{key}: {json.dumps(value)}\n" for key, value in metadata.items())
    return [f"---\n{head}---", f"# {title}"]


def table(settings: Mapping[str, object]) -> list[str]:
    """A table of settings."""
    rows = (f"| {name} | {_cell(value)} |" for name, value in settings.items())
    return ["| setting | value |", "|---|---|", *rows]


def _cell(value: object) -> str:
    """Text with lines, bars or marks of Markdown is code."""
    text = str(value)
    return f"`{json.dumps(text)}`".replace("|", "\\|") if any(mark in text for mark in "\n|`{") else text


def base_model(first: Path) -> str:
    """The model that a training began with, as its own configuration names it; its folder's name otherwise."""
    try:
        named = json.loads((first / "config.json").read_text(encoding="utf8")).get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        named = None
    return named if isinstance(named, str) and named else first.name


def _evaluation_lines(config: Config, version: int, evaluations: Sequence[Evaluated]) -> list[str]:
    lines = ["## Evaluation"]
    if all(evaluated.policy_version != version for evaluated in evaluations):
        lines.append(f"Version {version} was not evaluated.")
    if not evaluations:
        return [*lines, ""]
    sampling = config.evaluating.generation.sampling
    lines += [
        f"pass@1 on the run's own held-out problems, {config.evaluation.samples} rollouts a problem, temperature"
        f" {sampling.temperature:g}, top-p {sampling.top_p:g}, at most {sampling.max_new_tokens} tokens:",
        "",
        "| version | pass@1 |",
        "|---|---|",
    ]
    for evaluated in evaluations:
        mark = " (this one)" if evaluated.policy_version == version else ""
        lines.append(f"| {evaluated.policy_version}{mark} | {evaluated.pass_at_1:.4f} |")
    return [*lines, ""]


def _settings(config: Config) -> dict[str, object]:
    broker, learner, sampling = config.broker, config.learner, config.generation.sampling
    objective = learner.objective
    if isinstance(objective, EntryPointObjective):
        chosen = {"objective": objective.entry_point}
    else:
        chosen = {"objective": objective.name, "aggregation": objective.aggregation.value}
    return {
        **chosen,
        "learning rate": f"{learner.learning_rate:g}",
        "optimizer steps a batch": learner.steps_per_batch,
        "rollouts a problem": broker.group_size,
        "rollouts a batch": broker.batch_size,
        "PipelineRL-k": broker.pipeline_k,
        "reward": broker.reward.rule.value,
        "temperature": f"{sampling.temperature:g}",
        "top-p": f"{sampling.top_p:g}",
        "tokens of an answer at most": sampling.max_new_tokens,
        "tokens of prompt and answer at most": config.generation.max_tokens_total,
        "seed": config.run.seed,
    }
