"""`nouscoder pause`, `resume`, `drain`, `batch drop` and `dead-letters`: what operators do to a run."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nouscoder.cli.options import ConfigOption, JsonOption, SetOption
from nouscoder.cli.status import BrokerOption, broker_at

if TYPE_CHECKING:
    from nouscoder.config import Config

letters_app = typer.Typer(help="Rollouts that were given up: what they were, and why.", no_args_is_help=True)
batch_app = typer.Typer(help="The batch that is not committed yet.", no_args_is_help=True)

LettersArgument = Annotated[list[str] | None, typer.Argument(metavar="LETTER...", help="names from the list")]
AllOption = Annotated[bool, typer.Option("--all", help="every dead letter that is kept")]


def pause(
    address: BrokerOption = "",
    config_file: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop leasing work. Workers may still submit what they hold."""
    from nouscoder.cli.operate_text import mode_text
    from nouscoder.domain.run_status import RunMode

    _print(mode_text(_config(address, config_file, overrides), RunMode.PAUSED, as_json=as_json))


def resume(
    address: BrokerOption = "",
    config_file: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue after `pause` or `drain`."""
    from nouscoder.cli.operate_text import mode_text
    from nouscoder.domain.run_status import RunMode

    _print(mode_text(_config(address, config_file, overrides), RunMode.RUNNING, as_json=as_json))


def drain(
    wait_s: Annotated[
        float, typer.Option("--wait-s", help="seconds to wait until nothing is sampled or graded")
    ] = 600.0,
    address: BrokerOption = "",
    config_file: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop admitting groups, and wait until every admitted rollout is sampled and graded."""
    from nouscoder.cli.operate_text import drain_text

    _print(drain_text(_config(address, config_file, overrides), wait_s, typer.echo, as_json=as_json))


@batch_app.command("drop")
def drop_batch(
    batch_id: Annotated[int, typer.Argument(help="number of the batch, from why-stalled")],
    address: BrokerOption = "",
    config_file: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Abandon the rollouts of a batch that cannot be trained on; the next batch gets its number."""
    from nouscoder.cli.operate_text import drop_batch_text

    _print(drop_batch_text(_config(address, config_file, overrides), batch_id, as_json=as_json))


@letters_app.command("list")
def list_letters(
    address: BrokerOption = "",
    config_file: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the rollouts that were given up, newest first, with the cause of each."""
    from nouscoder.cli.operate_text import letters_text

    _print(letters_text(_config(address, config_file, overrides), as_json=as_json))


@letters_app.command("show")
def show_letter(
    letter: Annotated[str, typer.Argument(help="name from the list")],
    address: BrokerOption = "",
    config_file: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one dead letter, with the text that was sampled."""
    from nouscoder.cli.operate_text import letter_text

    _print(letter_text(_config(address, config_file, overrides), letter, as_json=as_json))


@letters_app.command("requeue")
def requeue_letters(
    letters: LettersArgument = None,
    every: AllOption = False,
    address: BrokerOption = "",
    config_file: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sample the problems of these dead letters again, each in a new group, and remove the letters."""
    from nouscoder.cli.operate_text import remove_letters_text

    config = _config(address, config_file, overrides)
    _print(remove_letters_text(config, letters or [], every=every, requeue=True, as_json=as_json))


@letters_app.command("drop")
def drop_letters(
    letters: LettersArgument = None,
    every: AllOption = False,
    address: BrokerOption = "",
    config_file: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove these dead letters and their records."""
    from nouscoder.cli.operate_text import remove_letters_text

    config = _config(address, config_file, overrides)
    _print(remove_letters_text(config, letters or [], every=every, requeue=False, as_json=as_json))


def _config(address: str, config_file: ConfigOption, overrides: SetOption) -> Config:
    from nouscoder.config import load_config

    return load_config(config_file, [*(overrides or []), *broker_at(address)])


def _print(text: Coroutine[Any, Any, str]) -> None:
    typer.echo(asyncio.run(text))
