"""A broker serves a run only with the seed, group size and problems that the run began with.

This module compares the broker's configuration with Redis. The learner's run id and folder are compared when it sends
its books (recovery.py). Problems may be removed from the problem file during a run: their groups are given up
(leased_work.py). A file with a new problem is refused.

INVARIANT: the identity of a run is written to Redis once, when its first learner sends its books, and never changed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from hashlib import blake2b

from nouscoder.broker.errors import BrokerUnavailable, Refused
from nouscoder.broker.store import Store
from nouscoder.config import Config
from nouscoder.domain.books import RunIdentity

log = logging.getLogger(__name__)

_DIGEST_BYTES = 8


async def check_state(store: Store, config: Config, problem_ids: Sequence[str]) -> None:
    """Compare what Redis holds under the run's name with this broker's configuration. Raises Refused.

    While Redis does not answer nothing is compared; the learner's books are compared later in any case.
    """
    try:
        (identity,) = await store.fields("meta", "identity")
        if identity is None:
            return
        check_settings(RunIdentity(**json.loads(identity)), config, "the run in Redis")
        began_with = await store.get("problems")
    except BrokerUnavailable as error:
        log.warning("the run in Redis is compared later", extra={"reason": str(error)})
        return
    if began_with is not None:
        _compare(began_with, problem_ids, config.run.name)


def check_settings(found: RunIdentity, config: Config, whose: str) -> None:
    """Raises Refused when `found` has another seed or group size than the configuration; the message names both."""
    ours = (
        ("run.seed", found.seed, config.run.seed),
        ("broker.group_size", found.group_size, config.broker.group_size),
    )
    differences = [f"{name} {theirs}, this broker has {wanted}" for name, theirs, wanted in ours if theirs != wanted]
    if differences:
        raise Refused(
            f"{whose}, {config.run.name}, has {' and '.join(differences)}: use the run's own configuration, or another"
            " run.name"
        )


async def note_problems(store: Store, problem_ids: Sequence[str], run: str) -> None:
    """Note the problems that the run begins with. Raises Refused when it began without one of these."""
    _compare(await store.run("note_problems", b"".join(sorted(map(_digest, problem_ids)))), problem_ids, run)


def _compare(began_with: bytes, problem_ids: Sequence[str], run: str) -> None:
    known = {began_with[place : place + _DIGEST_BYTES] for place in range(0, len(began_with), _DIGEST_BYTES)}
    new = [problem_id for problem_id in problem_ids if _digest(problem_id) not in known]
    if new:
        raise Refused(
            f"the problem file is not the one that run {run} began with: {len(new)} of its {len(problem_ids)} problems"
            f" are new, for example {new[0][:100]!r}: use the file that it began with, or another run.name"
        )
    if len(problem_ids) < len(known):
        log.warning(
            "the problem file has lost problems: their groups are given up",
            extra={"lost": len(known) - len(problem_ids), "left": len(problem_ids)},
        )


def _digest(problem_id: str) -> bytes:
    return blake2b(problem_id.encode(), digest_size=_DIGEST_BYTES).digest()
