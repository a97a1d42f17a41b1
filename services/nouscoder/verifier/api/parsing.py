"""Parses the bodies of requests: bounded before it costs much, and without stalling the event loop.

A decoder reads a whole text in one call, and the interpreter runs nothing else meanwhile, in whatever thread. So the
weight of the text (formats/json_size.py) is counted first, piece by piece, and a body with too many values is refused.

INVARIANT: no body above MAX_WEIGHT is decoded. A body above SMALL_WEIGHT is decoded in another process only
(parse_process.py). One above SMALL_BYTES with fewer values, which are long texts, is parsed outside of the event loop.
Either happens to one body at a time. What the values of a body take is charged to the memory budget before it is
decoded.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TypeVar

from nouscoder.formats.json_size import BYTES_PER_WEIGHT, TooManyValues, ValueCount, rough_weight
from nouscoder.verifier.access.memory_budget import charge_decoded
from nouscoder.verifier.api.parse_process import ParseProcess
from nouscoder.verifier.grading.long_work import OneThread
from nouscoder.verifier.grading.validation import InvalidSubmission

SMALL_BYTES = 256 * 1024
SMALL_WEIGHT = 10_000

Parsed = TypeVar("Parsed")
Parse = Callable[[bytes, ValueCount], Parsed]
Charge = Callable[[], Awaitable[None]]
thread = OneThread("parse")
_process = ParseProcess()


async def parsed(
    body: bytes,
    parse: Parse[Parsed],
    patiently: Callable[[Charge], Awaitable[None]] | None = None,
    weigh: Callable[[bytes], int] | None = None,
) -> Parsed:
    """What `parse`, a function of a module, makes of a body.

    `parse` also gets the count of the body's values, to which it adds texts that it decodes. `patiently` gets a
    function that charges the memory budget, and may call it again after MemoryBudgetExceeded. `weigh` returns the
    weight of a body that is not JSON. Raises what `parse` and `weigh` raise, MemoryBudgetExceeded, ParsingFailed, and
    QueueFull when other bodies take too long.
    """
    rough = rough_weight(body) if len(body) <= SMALL_BYTES else SMALL_WEIGHT + 1
    is_small = rough <= SMALL_WEIGHT
    values = ValueCount(rough if is_small else await thread.run(weigh or _weight, body))

    async def charge() -> None:
        charge_decoded(BYTES_PER_WEIGHT * values.weight)

    await (charge() if patiently is None else patiently(charge))
    if is_small:
        return parse(body, values)
    before = values.weight
    act = parse if before <= SMALL_WEIGHT else functools.partial(_process.parse, parse)
    found: Parsed = await thread.run(act, body, values)
    charge_decoded(BYTES_PER_WEIGHT * (values.weight - before))
    return found


def _weight(body: bytes) -> int:
    """Raises InvalidSubmission."""
    values = ValueCount()
    try:
        values.add(body)
    except TooManyValues as error:
        raise InvalidSubmission("body", str(error)) from None
    return values.weight
