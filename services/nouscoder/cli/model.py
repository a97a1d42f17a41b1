"""`nouscoder model`: folders of models."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

model_app = typer.Typer(no_args_is_help=True, help="Folders of models.")


class WeightType(StrEnum):
    """The types in which a folder may hold weights."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


@model_app.callback()
def _model() -> None:
    """Folders of models."""


@model_app.command("import")
def model_import(
    file: Annotated[Path, typer.Argument(metavar="FILE.gguf", help="the model, quantised or not")],
    out: Annotated[Path, typer.Option(help="the new Hugging Face folder")],
    dtype: Annotated[WeightType, typer.Option(help="type of the weights in it")] = WeightType.BFLOAT16,
) -> None:
    """Make a Hugging Face folder of a GGUF file: weights, tokenizer, chat template, end tokens."""
    from nouscoder.policy_folder.gguf import import_gguf

    num_weights = import_gguf(file.absolute(), out, dtype.value)
    typer.echo(f"{out} is written: {num_weights:,} weights; begin a run with: nouscoder init {out} PROBLEMS.jsonl")
