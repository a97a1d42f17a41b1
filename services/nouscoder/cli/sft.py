"""`nouscoder sft`: supervised fine-tuning of a policy, and examples from a teacher."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from nouscoder.cli.options import (
    AGAIN,
    ConfigOption,
    JsonOption,
    Opened,
    RunByDefault,
    SetOption,
    goes_on,
    json_fields,
    new,
    only_with,
)
from nouscoder.config import load_config
from nouscoder.errors import for_terminal

sft_app = typer.Typer(
    cls=RunByDefault,
    no_args_is_help=True,
    help="Supervised fine-tuning of a policy. `sft CONFIG ...` is `sft run CONFIG ...`.",
)


@sft_app.command("run")
def sft_run(
    config_file: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help=r"configuration of a run, with a section \[sft]")
    ] = None,
    model: Annotated[str, typer.Option(help="policy.path: Hugging Face folder or ORGANISATION/MODEL")] = "",
    data: Annotated[list[Path] | None, typer.Option(help="sft.train: a file of examples or a run folder")] = None,
    validation: Annotated[list[Path] | None, typer.Option(help="sft.validation: a file of examples")] = None,
    out: Annotated[Path | None, new("folder", "sft.out: the new Hugging Face folder")] = None,
    name: Annotated[str, typer.Option(help="run.name: the run folder is runs/NAME-sft")] = "",
    epochs: Annotated[int | None, typer.Option(help="sft.epochs")] = None,
    batch_size: Annotated[int | None, typer.Option(help="sft.batch_size: examples of one step")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="sft.learning_rate")] = None,
    seed: Annotated[int | None, typer.Option(help="run.seed")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue an earlier fine-tuning of this name")] = False,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Fine-tune a policy on examples. Each option but --resume and --json sets one key of the configuration."""
    from nouscoder.config.tree import read_given
    from nouscoder.run.supervisor import wait_passively

    options = {
        "policy.path": model,
        "sft.train": [str(path) for path in data or []],
        "sft.validation": [str(path) for path in validation or []],
        "sft.out": "" if out is None else str(out),
        "run.name": name,
        "sft.epochs": epochs,
        "sft.batch_size": batch_size,
        "sft.learning_rate": learning_rate,
        "run.seed": seed,
    }
    # JSON of texts, numbers and lists of texts is TOML too.
    given = [f"{key}={json.dumps(value)}" for key, value in options.items() if value not in ("", None, [])]
    wait_passively()
    values = [*given, *(overrides or [])]
    config = load_config(config_file, values)
    from nouscoder.sft.run import fine_tune

    summary = fine_tune(
        config,
        resume=resume,
        given=read_given(config_file, values),
        say=lambda line: typer.echo(for_terminal(line), err=True),
    )
    if summary is not None:
        typer.echo(for_terminal(json.dumps(summary) if as_json else _text(summary)))


@sft_app.command("sample")
def sft_sample(
    problems: Annotated[Path, typer.Argument(help="problem file: JSON lines or parquet")],
    url: Annotated[str, typer.Option(help="server with OpenAI's API: a teacher, or a run's generation service")],
    model: Annotated[str, typer.Option(help="name of the model at the server")],
    out: Annotated[Path, new("file", "file of examples; an earlier sampling for it is continued")],
    num_samples: Annotated[int, typer.Option("--n", min=1, help="answers to each problem")] = 16,
    temperature: Annotated[float, typer.Option(min=0.0, help="of the sampling")] = 0.6,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="of the sampling")] = 0.95,
    max_tokens: Annotated[int, typer.Option(min=1, help="of one answer")] = 32_768,
    seed: Annotated[int, typer.Option(help="of the sampling; each answer has a seed of its own")] = 0,
    extra: Annotated[str, typer.Option(help="JSON object of further fields of each request")] = "{}",
    prefill: Opened = "",
    at_once: Annotated[int, typer.Option(min=1, help="requests to the server at the same time")] = 16,
    verifier: Annotated[str | None, typer.Option(help="URL of a grading service; default: this machine")] = None,
    token: Annotated[str | None, typer.Option(help="the service's token; default: NOUSCODER_TOKEN")] = None,
    ca: Annotated[Path | None, typer.Option(help="PEM file of the authority of the service's certificate")] = None,
    as_json: JsonOption = False,
    config_file: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Sample answers of a teacher, verify them, and write all of them as examples with their verdicts."""
    from nouscoder.domain.prompt import PromptSettings
    from nouscoder.evaluation.evaluate import EvaluationRequest
    from nouscoder.evaluation.samples import SamplingSettings
    from nouscoder.sft.teacher import sample_teacher

    only_with("--verifier", verifier, "--token", "--ca")
    config = load_config(config_file, overrides or [])
    asked = config.generation.environment.record(PromptSettings).resolved(has_chat_template=True)
    sampling = SamplingSettings(
        model, num_samples, temperature, top_p, max_tokens, seed, asked, json_fields("--extra", extra), prefill
    )
    request = EvaluationRequest(
        problems=problems,
        out=out,
        sampling=sampling,
        url=url,
        at_once=at_once,
        verifier=verifier,
        token=token,
        ca=ca,
    )
    with goes_on(AGAIN):
        found = sample_teacher(request, config)
    typer.echo(for_terminal(json.dumps({**asdict(found), "file": str(found.file)}) if as_json else found.text()))


@sft_app.command("import")
def sft_import(
    files: Annotated[
        list[str], typer.Argument(help="OpenCodeReasoning: parquet, JSON lines, or hub:ORGANISATION/NAME")
    ],
    out: Annotated[Path, new("file", "file of examples: .jsonl, .jsonl.gz or .jsonl.zst")],
    questions: Annotated[
        list[str] | None, typer.Option(help="DATASET/SPLIT=FILE: where questions stand that the rows do not hold")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make examples of the rows of OpenCodeReasoning, with their pass rates as verdicts."""
    from nouscoder.sft.open_code_reasoning import import_examples

    found = import_examples(files, out, questions or [])
    typer.echo(for_terminal(json.dumps(asdict(found)) if as_json else found.text()))


def _text(summary: dict[str, Any]) -> str:
    dropped = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in summary["dropped"].items())
    lines = [
        f"{summary['steps']} steps on {summary['examples']} examples" + (f" (dropped: {dropped})" if dropped else ""),
        f"loss of the last batch {summary['loss']:.4f}",
    ]
    if summary["validation_loss"] is not None:
        before, after = summary["validation_loss_before"], summary["validation_loss"]
        lines.append(
            f"validation loss {before:.4f} before, {after:.4f} after, on {summary['validation_examples']} examples"
        )
    return "\n".join([*lines, f"the policy is in {summary['model']}"])
