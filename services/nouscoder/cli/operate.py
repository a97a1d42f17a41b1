"""`nouscoder pause`, `resume`, `drain`, `batch drop` and `dead-letters`: what operators do to a run."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from nouscoder.cli.options import ListByDefault
from nouscoder.cli.status import Answer, asks_broker, broker_of
from nouscoder.config import Config
from nouscoder.domain.run_status import DeadLetter, RolloutState, RunMode, RunStatus
from nouscoder.errors import NousCoderError, Unusable, WrongUse

if TYPE_CHECKING:
    from nouscoder.rpc.broker_client import BrokerClient

_LOOK_EVERY_S = 1.0


class OperationFailed(NousCoderError):
    """The operation cannot be done. The message says why."""


async def mode_text(config: Config, mode: RunMode, *, as_json: bool) -> str:
    """Set the mode of the run. Raises PeerError."""
    async with broker_of(config) as broker:
        former = await broker.set_mode(mode)
    if as_json:
        return json.dumps({"mode": mode.value, "former": former.value})
    return f"the run is {mode.value}" if mode is not former else f"the run was {mode.value} already"


async def drain_text(config: Config, wait_s: float, say: Callable[[str], object], *, as_json: bool) -> str:
    """Drain the run. Raises OperationFailed when rollouts are still at work after `wait_s`, and PeerError."""
    end_s, reported = time.monotonic() + wait_s, -1
    async with broker_of(config) as broker:
        await broker.set_mode(RunMode.DRAINING)
        while at_work := _at_work(status := await broker.status()):
            if time.monotonic() > end_s:
                raise OperationFailed(
                    f"{at_work} rollouts are still sampled or graded after {wait_s:.0f} s: ask `nouscoder why-stalled`."
                    " The run admits nothing until `nouscoder resume`"
                )
            if at_work != reported and not as_json:
                say(f"{at_work} rollouts are still sampled or graded")
                reported = at_work
            await asyncio.sleep(_LOOK_EVERY_S)
    left = {state: count for state, count in status.ledger.in_flight.items() if count}
    if as_json:
        return json.dumps({"mode": RunMode.DRAINING.value, "in_flight": left})
    kept = ", ".join(f"{count} {state}" for state, count in left.items()) or "nothing is in flight"
    return f"the run is drained: {kept}. `nouscoder resume` goes on"


def _at_work(status: RunStatus) -> int:
    """The rollouts that are worked on to their end while a run is drained."""
    states = (RolloutState.QUEUED, RolloutState.SAMPLING, RolloutState.SAMPLED, RolloutState.GRADING)
    return sum(status.ledger.in_flight.get(state.value, 0) for state in states)


async def drop_batch_text(
    config: Config,
    batch_id: Annotated[int, typer.Argument(help="number of the batch, from why-stalled")],
    *,
    as_json: bool,
) -> str:
    """Abandon the rollouts of a batch that cannot be trained on; the next batch gets its number."""
    async with broker_of(config) as broker:
        num_rollouts = await broker.drop_batch(batch_id)
    if as_json:
        return json.dumps({"batch_id": batch_id, "abandoned": num_rollouts})
    return f"batch {batch_id} is dropped: {num_rollouts} rollouts are abandoned, and the next batch gets its number"


async def letters_text(config: Config, *, as_json: bool) -> str:
    """List the rollouts that were given up, newest first, with the cause of each."""
    async with broker_of(config) as broker:
        letters = await broker.dead_letters()
    if as_json:
        return json.dumps([_record(letter) for letter in letters], indent=1)
    if not letters:
        return "no dead letters"
    return "\n".join(
        f"{letter.letter_id}  {letter.rollout_id} of {letter.problem_id}: {_cause(letter)}, {letter.age_s:.0f} s ago"
        for letter in letters
    )


async def letter_text(
    config: Config, letter: Annotated[str, typer.Argument(help="name from the list")], *, as_json: bool
) -> str:
    """Show one dead letter, with the text that was sampled."""
    async with broker_of(config) as broker:
        found = next((one for one in await broker.dead_letters() if one.letter_id == letter), None)
        if found is None:
            raise Unusable(f"there is no dead letter {letter}: `nouscoder dead-letters list` names them")
        text = await _text_of(broker, found)
    record = _record(found) | {"text": text}
    if as_json:
        return json.dumps(record, indent=1)
    fields = "\n".join(f"{name}: {value}" for name, value in record.items() if name not in ("text", "header"))
    return f"{fields}\n\n{text}" if text is not None else f"{fields}\n\n(never sampled)"


async def _text_of(broker: BrokerClient, letter: DeadLetter) -> str | None:
    """The completion that was graded; None when nothing was sampled."""
    from nouscoder.store.record_store import ByteRange
    from nouscoder.store.rollout_record import decode_text

    if letter.header is None or not letter.record:
        return None
    data = bytearray()
    section = ByteRange(letter.record, letter.header.text_offset, letter.header.text_bytes)
    async for _, piece in broker.stream_records([section]):
        data += piece
    return decode_text(bytes(data))


async def remove_letters_text(
    config: Config, letter_ids: Sequence[str], *, every: bool, requeue: bool, as_json: bool
) -> str:
    """Requeue or drop dead letters. Raises WrongUse when none are named, and PeerError."""
    if every == bool(letter_ids):
        raise WrongUse("name dead letters, or give --all")
    async with broker_of(config) as broker:
        if every:
            letter_ids = [letter.letter_id for letter in await broker.dead_letters()]
        removed, problem_ids = await broker.remove_dead_letters(letter_ids, requeue=requeue)
    if as_json:
        return json.dumps({"removed": removed, "requeued_problem_ids": problem_ids})
    if not requeue:
        return f"{removed} dead letters dropped"
    asked = ", ".join(problem_ids) or "none"
    return f"{removed} dead letters removed; problems that get a new group: {asked}"


def _record(letter: DeadLetter) -> dict[str, object]:
    return asdict(letter) | {"reason": letter.reason.value, "cause": _cause(letter)}


def _cause(letter: DeadLetter) -> str:
    held = f", last by {letter.worker_id}" if letter.worker_id else ""
    if letter.detail:
        return f"{letter.reason.value} ({letter.regrades} gradings{held}): {letter.detail}"
    return f"{letter.reason.value} ({letter.deliveries} deliveries on {letter.stream}{held})"


letters_app = typer.Typer(
    cls=ListByDefault, help="Rollouts that were given up: what they were, and why. Without a subcommand: `list`."
)
batch_app = typer.Typer(help="The batch that is not committed yet.", no_args_is_help=True)

LettersArgument = Annotated[list[str] | None, typer.Argument(metavar="LETTER...", help="names from the list")]
AllOption = Annotated[bool, typer.Option("--all", help="every dead letter that is kept")]


@asks_broker
def pause(config: Config, *, as_json: bool) -> Answer:
    """Stop leasing work. Workers may still submit what they hold."""
    return mode_text(config, RunMode.PAUSED, as_json=as_json)


@asks_broker
def resume(config: Config, *, as_json: bool) -> Answer:
    """Continue after `pause` or `drain`."""
    return mode_text(config, RunMode.RUNNING, as_json=as_json)


@asks_broker
def drain(
    config: Config,
    wait_s: Annotated[
        float, typer.Option("--wait-s", help="seconds to wait until nothing is sampled or graded")
    ] = 600.0,
    *,
    as_json: bool,
) -> Answer:
    """Stop admitting groups, and wait until every admitted rollout is sampled and graded."""
    return drain_text(config, wait_s, typer.echo, as_json=as_json)


batch_app.command("drop")(asks_broker(drop_batch_text))
letters_app.command("list")(asks_broker(letters_text))
letters_app.command("show")(asks_broker(letter_text))


@letters_app.command("requeue")
@asks_broker
def requeue_letters(
    config: Config, letters: LettersArgument = None, every: AllOption = False, *, as_json: bool
) -> Answer:
    """Sample the problems of these dead letters again, each in a new group, and remove the letters."""
    return remove_letters_text(config, letters or [], every=every, requeue=True, as_json=as_json)


@letters_app.command("drop")
@asks_broker
def drop_letters(config: Config, letters: LettersArgument = None, every: AllOption = False, *, as_json: bool) -> Answer:
    """Remove these dead letters and their records."""
    return remove_letters_text(config, letters or [], every=every, requeue=False, as_json=as_json)
