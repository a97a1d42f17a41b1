"""`nouscoder self-play`: the policy proposes problems, and is trained on those that are accepted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from nouscoder.cli.options import JsonOption, SetOption
from nouscoder.config import load_config


def self_play(
    config_file: Annotated[
        Path, typer.Argument(metavar="CONFIG", help=r"configuration of a run, with a section \[self_play]")
    ],
    resume: Annotated[bool, typer.Option("--resume", help="continue an earlier self-play of this name")] = False,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Train in rounds: the policy proposes problems, and is trained on those that are valid and neither easy nor hard.

    With self_play.proposals=0 the same rounds train on the seed problems alone, for comparison.
    """
    from nouscoder.config.tree import read_given
    from nouscoder.run.supervisor import wait_passively

    wait_passively()
    config = load_config(config_file, overrides or [])
    from nouscoder.self_play.run import self_play as run_self_play

    given = read_given(config_file, overrides or [])
    raise typer.Exit(asyncio.run(run_self_play(config, resume=resume, as_json=as_json, given=given)))
