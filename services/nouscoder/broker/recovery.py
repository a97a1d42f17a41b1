"""Restores Redis from the learner's state after it lost a part: its last writes, or everything.

The learner sends its state when it starts, and whenever the broker refuses a call of it as `Behind`. Redis then takes
batches, steps, policy, trained groups and the number of the next group from it. Rollouts in flight continue,
unless the learner has trained on them. A new epoch begins, so all former leases are lost. Rollouts that Redis no longer
knows are counted as lost.

INVARIANT: a group in the learner's state is never in flight after a restore, and the ledger balances before and after.

A broker serves a run only with the seed, group size and problems that the run began with, which are in Redis. The id
in the run folder is compared by a broker that sees the folder, when it starts, and when the learner sends its state.
Problems may be removed from the problem file during a run: their groups are given up (streams.py). A file with a new
problem is refused.

INVARIANT: the identity of a run is written to Redis once, when its first learner sends its state, and never changed.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import blake2b

from nouscoder.broker import batches
from nouscoder.broker.errors import BrokerUnavailable, Refused
from nouscoder.broker.store import Store, Value
from nouscoder.config import Config
from nouscoder.domain.learner_state import Restored, RunIdentity, TrainedState
from nouscoder.json_file import read_json_object
from nouscoder.rpc.pairs import MANIFEST

log = logging.getLogger(__name__)

_EPOCH_BYTES = 8
# A commit, a publication, and a comparison after them; two more rounds in case other calls of the learner come between.
_MAX_ROUNDS = 5


async def restore(store: Store, trained: TrainedState, most_groups: int, furthest: int) -> Restored:
    """Make Redis agree with the learner. Raises Refused when Redis has another run, or is ahead of the learner.

    `most_groups` is the number of groups admitted so far, as this broker knows it: those that Redis lost are counted as
    lost. The curriculum continues at the place `furthest` or later.
    """
    for _ in range(_MAX_ROUNDS):
        answer, *rest = await store.run("restore", *_arguments(trained, most_groups), furthest)
        match answer.decode():
            case "commit":
                await batches.commit_batch(store, trained.batches - 1, trained.step)
            case "publish":
                assert trained.policy is not None
                await batches.publish(store, trained.policy)
            case "same":
                return Restored(was_behind=False)
            case "restored":
                restored = Restored(was_behind=bool(rest[1]), rollouts_lost=int(rest[0]))
                if restored.was_behind:
                    log.warning(
                        "Redis had forgotten a part of the run: restored from the learner's state",
                        extra={"batches": trained.batches, "rollouts_lost": restored.rollouts_lost},
                    )
                return restored
            case "another":
                raise Refused(_another(RunIdentity(**json.loads(rest[0])), int(rest[1]), trained.identity))
            case "weights":
                assert trained.policy is not None
                raise Refused(
                    f"policy version {trained.policy.policy_version} was published before with other weights:"
                    " the learner's folder and Redis are not of one run"
                )
            case _:
                raise Refused(
                    f"Redis has {int(rest[0])} batches and policy version {int(rest[1])}, and the checkpoints in"
                    f" {trained.identity.folder} have {trained.batches} batches: checkpoints of this run are missing"
                )
    raise Refused("the run changed while it was compared with the learner's state: does a second learner run?")


def _arguments(trained: TrainedState, most_groups: int) -> list[Value]:
    policy, next_group = trained.policy, max(trained.groups.next_group, most_groups)
    newest: list[Value] = [-1, "", ""]
    if policy is not None:
        newest = [policy.policy_version, policy.digest, MANIFEST.encode(policy)]
    return [
        *(trained.identity.run_id, json.dumps(asdict(trained.identity)), secrets.token_hex(_EPOCH_BYTES)),
        *(trained.batches, trained.step, trained.rollouts, next_group, trained.groups.bits),
        *newest,
    ]


def _another(found: RunIdentity, num_batches: int, wanted: RunIdentity) -> str:
    """Which run Redis holds, what differs, and what to do."""
    differences = [
        f"{name} {theirs} instead of {ours}"
        for name, theirs, ours in (
            ("folder", found.folder, wanted.folder),
            ("run.seed", found.seed, wanted.seed),
            ("broker.group_size", found.group_size, wanted.group_size),
        )
        if theirs != ours
    ]
    return (
        f"Redis holds another run of this name, {found.run_id} with {num_batches} batches"
        f" ({', '.join(differences) or 'its folder was created again'}; this run is {wanted.run_id}):"
        " give this run another run.name, or remove the other with `nouscoder runs rm`"
    )


_DIGEST_BYTES = 8


async def check_state(store: Store, config: Config, problem_ids: Sequence[str]) -> None:
    """Compare what Redis holds under the run's name with this broker's configuration. Raises Refused.

    While Redis does not answer nothing is compared; the learner's state is compared later in any case.
    """
    try:
        (identity,) = await store.fields("meta", "identity")
        if identity is None:
            return
        found = RunIdentity(**json.loads(identity))
        # The run folder, where this broker sees it, must be that of the run in Redis.
        folder = config.run.folder
        own = folder / "identity.json"  # learner/state/run_files.py
        run_id = read_json_object(own, Refused).get("run_id") if own.is_file() else None
        if (folder / "config.toml").is_file() and run_id != found.run_id:
            raise Refused(
                f"Redis holds another run of the name {config.run.name}, {found.run_id} of {found.folder}, which may"
                " still be at work: give this run another run.name, or remove the other with `nouscoder runs rm`"
            )
        check_settings(found, config, "the run in Redis")
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
