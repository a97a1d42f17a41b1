"""The broker's access to Redis: runs the Lua scripts of one run, and maps errors of Redis to those of the broker.

INVARIANT: all state of a run is under one prefix in Redis, and none in this process. Each script is atomic, so a broker
that is killed leaves no half transition. A Redis whose memory is full refuses new rollouts only: scripts that free
memory, or add little, still run.

`RunRules` are the settings that the scripts enforce. Which groups may be admitted is one rule of lua/lease.lua and
lua/lease_batch.lua. With k = pipeline_k, n = B / G groups a batch, m batches made so far and v the newest published
policy version, a group is admitted only while afterwards

    groups in flight and not in a batch  <=  (k - (m - v)) * n.

m - v is the number of batches that are made and have no published version yet, so rollouts in training count too. One
script checks the rule and admits. docs/design/staleness.md proves that therefore no token is
more than k - 1 versions old when it is trained on, and that a run cannot deadlock. The rule counts groups, not
rollouts: a group that lost members to dead letters still takes one of the n places of a batch.

While the memory of Redis fills, first no group is admitted, then no rollout is taken (`MemoryWatch`). The rest of
maxmemory is a reserve for grading, batches, commits, heartbeats and deletion, so that batches are trained
on and memory is freed. Redis runs their scripts even above maxmemory.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from redis import exceptions

from nouscoder.broker.errors import BrokerError, BrokerUnavailable, RedisFull
from nouscoder.broker.redis_address import without_password
from nouscoder.broker.redis_client import open_client
from nouscoder.broker.wakeups import Waits
from nouscoder.config import BrokerSection
from nouscoder.domain.signal import EQUAL_DIFFERENCE, EQUAL_SHARE
from nouscoder.domain.staleness import StalenessBound
from nouscoder.store.redis_records import PASSING, kind_of

log = logging.getLogger(__name__)

# A consumer that holds nothing and asked for nothing for this time is deleted.
FORGET_CONSUMER_S = 3600.0
# A record that no rollout took this time after it was announced is deleted.
FORGET_RECORD_S = 600.0
# The reason why work was cancelled is kept this time for the heartbeat of its worker.
FORGET_CANCELLED_S = 600.0


@dataclass(frozen=True, slots=True)
class RunRules:
    """`batch_groups` (B / G) is the number of groups in a batch; one script ends at most `commit_chunk` rollouts.

    `pipeline_k`, `max_age` and `waits_for_older` follow from `broker.stale_policy` (domain/staleness.py).
    """

    group_size: int
    pipeline_k: int
    batch_groups: int
    max_age: int
    waits_for_older: bool
    max_deliveries: int
    max_regrades: int
    drop_zero_variance: bool
    max_filtered_groups: int
    solved_pass_rate: float
    retires_for_good_after: int
    over_sampling: float
    lease_ms: int
    batch_lease_ms: int
    sampling_progress_ms: int
    grading_progress_ms: int
    max_batch_failures: int
    max_batch_deliveries: int
    dead_letters: int
    equal_share: float = field(default=EQUAL_SHARE, init=False)
    equal_difference: float = field(default=EQUAL_DIFFERENCE, init=False)
    announced_ms: int = field(default=int(1000 * FORGET_RECORD_S), init=False)
    commit_chunk: int = field(default=1024, init=False)
    forget_ms: int = field(default=int(1000 * FORGET_CONSUMER_S), init=False)
    cancelled_ms: int = field(default=int(1000 * FORGET_CANCELLED_S), init=False)

    @classmethod
    def of(cls, section: BrokerSection) -> Self:
        """The rules of a configuration."""
        bound = StalenessBound.of(section.stale_policy, section.pipeline_k, section.max_staleness)
        return section.record(
            cls,
            pipeline_k=bound.pipeline_k,
            batch_groups=section.batch_size // section.group_size,
            max_age=bound.max_age,
            waits_for_older=bound.waits_for_older,
            solved_pass_rate=section.curriculum.retire_pass_rate,
            retires_for_good_after=section.curriculum.retires_for_good_after,
            lease_ms=round(1000 * section.lease_s),
            batch_lease_ms=round(1000 * section.batch_lease_s),
            sampling_progress_ms=round(1000 * section.sampling_progress_s),
            grading_progress_ms=round(1000 * section.grading_progress_s),
        )

    def to_json(self) -> str:
        """As the scripts read them."""
        return json.dumps(asdict(self))


_FOLDER = Path(__file__).parent / "lua"
# Scripts that Redis may refuse when its memory is full: those that add rollouts, and those that only read.
_NEED_MEMORY = frozenset(
    {
        *("announce_records", "keep_partials", "submit_rollouts"),
        *("status", "holders", "read_batch", "read_headers", "available", "letters"),
    }
)
# Redis refuses a script at maxmemory only if its first write may use more memory, and DEL never does. (The flag
# allow-oom of Redis 7 would say the same, but Redis 6 does not know it.)
_PASS_WHEN_FULL = "redis.call('DEL', P .. 'no such key')\n"

Answer = TypeVar("Answer")
Value = str | bytes | int | float


def _load_scripts() -> dict[str, str]:
    common = (_FOLDER / "common.lua").read_text(encoding="utf8")
    scripts = {path.stem: path.read_text(encoding="utf8") for path in _FOLDER.glob("*.lua") if path.stem != "common"}
    return {name: common + ("" if name in _NEED_MEMORY else _PASS_WHEN_FULL) + text for name, text in scripts.items()}


def _raise_swallowed_cancellation() -> None:
    """Raise the cancellation that redis-py (8.1) swallows in the middle of a command.

    Without this a drain would wait for ever, and a call whose client is gone would continue to lease for it.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class Store:
    """The scripts of the run `run` on the Redis at `url`. Nothing is connected before the first call."""

    def __init__(self, url: str, run: str, rules: RunRules, timeout_s: float = 10.0) -> None:
        self.url = without_password(url)  # for messages
        # Braces keep all keys of a run in one slot of a Redis cluster.
        self.prefix = f"nouscoder:{{{run}}}:"
        self._rules = rules.to_json()
        self.redis = open_client(url, timeout_s)
        self._scripts = {name: self.redis.register_script(text) for name, text in _load_scripts().items()}

    async def close(self) -> None:
        """Close the connections."""
        await self.redis.aclose()

    async def run(self, script: str, *values: Value) -> Any:
        """Run one script. Raises BrokerUnavailable, and BrokerError for any other error of Redis."""
        return await self._answer(self._evaluate(script, values))

    @asynccontextmanager
    async def answers_within(self, limit_s: float) -> AsyncIterator[None]:
        """Calls in this context raise BrokerUnavailable once `limit_s` seconds are over.

        Otherwise a Redis that accepts connections and answers nothing costs each call several time limits of redis-py.
        """
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise BrokerUnavailable(f"Redis at {self.url} does not answer: nothing came for {limit_s:.0f} s") from None

    async def fields(self, key: str, *fields: str) -> list[bytes | None]:
        """The named fields of the hash at this key, None for each that is missing. Raises BrokerUnavailable."""
        found: list[bytes | None] = await self._answer(self.redis.hmget(self.prefix + key, list(fields)))  # type: ignore[arg-type]
        return found

    async def get(self, key: str) -> bytes | None:
        """The string at this key, None when there is none. Raises BrokerUnavailable."""
        found: bytes | None = await self._answer(self.redis.get(self.prefix + key))  # type: ignore[arg-type]
        return found

    async def pressure(self) -> Pressure:
        """How full Redis is. Raises BrokerUnavailable, and BrokerError when the user of Redis lacks the permission."""
        info = await self._answer(self.redis.info("memory"))
        return Pressure(int(info["used_memory"]), int(info.get("maxmemory", 0)))

    async def _answer(self, call: Awaitable[Answer]) -> Answer:
        """The result of `call`. Raises BrokerError for an error of Redis."""
        try:
            answer = await call
            _raise_swallowed_cancellation()
            return answer
        except (exceptions.RedisError, OSError) as error:
            _raise_swallowed_cancellation()
            if kind_of(error) in ("READONLY", "MASTERDOWN"):
                # Another Redis is the master now. A new connection looks up its address.
                await self.redis.connection_pool.disconnect(inuse_connections=False)
            raise self._mapped(error) from error

    async def _evaluate(self, script: str, values: tuple[Value, ...]) -> Any:
        try:
            return await self._call(script, values)
        except exceptions.ResponseError as error:
            if kind_of(error) != "NOGROUP":
                raise
        # Redis is new or was wiped: create the streams, then repeat the script.
        await self._call("open", ())
        return await self._call(script, values)

    async def _call(self, script: str, values: tuple[Value, ...]) -> Any:
        return await self._scripts[script](keys=[self.prefix], args=[self._rules, *values])

    def _mapped(self, error: exceptions.RedisError | OSError) -> BrokerError:
        kind, text = kind_of(error), str(error)
        if kind == "OOM":
            return RedisFull(f"Redis at {self.url} is full (maxmemory): {text}")
        if kind in PASSING:
            return BrokerUnavailable(f"Redis at {self.url} cannot serve now, {kind}: {text}")
        if kind == "WRONGPASS":
            return BrokerUnavailable(f"Redis at {self.url} does not accept the user or password: {text}")
        if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | OSError):
            return BrokerUnavailable(f"Redis at {self.url} does not answer: {text}")
        if kind == "NOPERM":
            return BrokerError(f"the user of Redis at {self.url} lacks a permission (docs/redis-keys.md): {text}")
        if kind in ("MOVED", "ASK"):
            return BrokerError(f"Redis at {self.url} is a node of a cluster that does not hold this run: {kind} {text}")
        return BrokerError(f"Redis at {self.url} answered: {text}")


def groups_wanted(rules: RunRules, max_tasks: int) -> int:
    """The number of groups that have `max_tasks` tasks: one lease call admits no more."""
    return -(-max_tasks // rules.group_size)


# Shares of maxmemory. Between the two is room for the rollouts of groups that were admitted before.
ADMIT_UP_TO = 0.75
TAKE_UP_TO = 0.9
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Pressure:
    """Bytes that Redis uses and its maxmemory, 0 when it has none, and what follows from them."""

    used: int = 0
    limit: int = 0

    @property
    def share(self) -> float:
        """The share of maxmemory in use; 0 when there is no limit."""
        return self.used / self.limit if self.limit else 0.0

    @property
    def admits(self) -> bool:
        """New groups may be admitted."""
        return self.share <= ADMIT_UP_TO

    @property
    def takes(self) -> bool:
        """Sampled rollouts may be taken."""
        return self.share <= TAKE_UP_TO

    @property
    def reason(self) -> str:
        """What is refused and why, in one sentence; empty when nothing is."""
        if self.admits:
            return ""
        refused = "no group is admitted" if self.takes else "no group is admitted and no rollout is taken"
        return (
            f"Redis uses {self.used >> 20} of its {self.limit >> 20} MiB (maxmemory): {refused} until batches are"
            " committed; if that lasts, give Redis more memory, lower broker.pipeline_k, or keep records elsewhere"
            " (broker.records.backend)"
        )


class MemoryWatch:
    """The pressure that was seen last. While Redis does not answer, there is none."""

    def __init__(self, store: Store) -> None:
        self.pressure = Pressure()
        self._store = store

    async def keep_watching(self, waits: Waits) -> None:
        """Look how full Redis is, until the broker stops."""
        while not waits.ended:
            try:
                pressure = await self._store.pressure()
            except BrokerError as error:  # Redis is away, or this account may not ask for its memory
                log.debug("the memory of Redis is unknown", extra={"reason": str(error)})
                pressure = Pressure()
            if bool(pressure.reason) != bool(self.pressure.reason):
                log.warning("back-pressure changed", extra={"reason": pressure.reason or "none"})
            self.pressure = pressure
            await asyncio.sleep(_LOOK_EVERY_S)
