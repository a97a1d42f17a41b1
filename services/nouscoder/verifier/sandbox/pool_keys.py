"""The keys of a pool of runners: that of the file now, and those before it while runners have them.

INVARIANT: a changed file loses no runner. One that was made with an earlier key stays usable until it is replaced,
which the sandbox does between two submissions. An unreadable file changes nothing.

A runner has the key of its start. The Secrets of the two namespaces change at different moments, and the kubelet
updates the gateway's file up to a minute later, so both orders occur: runners with a key that is not yet in the file
are made again (`pool.py`), and a runner counts as outdated only after `_SETTLE_S`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nouscoder.verifier.runner import greeting
from nouscoder.verifier.sandbox.base import SandboxUnavailable
from nouscoder.verifier.sandbox.runner_state import Runner, RunnerState

if TYPE_CHECKING:
    from nouscoder.verifier.sandbox.pool import RunnerPool

log = logging.getLogger(__name__)

_SETTLE_S = 30.0  # after a change, and after a runner was first reached
_MAX_KEYS = 3


class PoolKeys:
    """The keys of one pool, the newest first."""

    def __init__(self, key: bytes, path: Path | None = None) -> None:
        """Without `path` the key never changes."""
        self._keys: tuple[bytes, ...] = (key,)
        self._path = path
        self._changed_s = time.monotonic()
        self._answered: dict[str, tuple[bytes, float]] = {}  # by runner: the key that it has, since when this is known
        self._problem = ""

    @staticmethod
    def of_file(path: Path) -> PoolKeys:
        """Raises SandboxUnavailable."""
        try:
            return PoolKeys(_read(path), path)
        except (OSError, ValueError, greeting.GreetingError) as error:
            raise SandboxUnavailable(f"verifier.sandbox.pool_key_file: {path} cannot be used: {error}") from error

    def of(self, runner: str) -> tuple[bytes, ...]:
        """The keys to try with a runner, the most probable first."""
        known = self._answered.get(runner)
        return self._keys if known is None else (known[0], *(key for key in self._keys if key != known[0]))

    def answered(self, runner: str, key: bytes) -> None:
        """Note that a runner has proved this key."""
        if (known := self._answered.get(runner)) is None or known[0] != key:
            self._answered[runner] = (key, time.monotonic())

    def forget_all_but(self, runners: frozenset[str]) -> None:
        """Forget what is known of runners that are gone."""
        self._answered = {name: known for name, known in self._answered.items() if name in runners}

    def is_outdated(self, runner: str) -> bool:
        """Whether a runner has an earlier key, and had time to get the newest."""
        known = self._answered.get(runner)
        if known is None or known[0] == self._keys[0]:
            return False
        return time.monotonic() - max(known[1], self._changed_s) >= _SETTLE_S

    def reload(self) -> bool:
        """Read the file again. Returns whether it holds another key."""
        if self._path is None:
            return False
        try:
            key = _read(self._path)
        except (OSError, ValueError, greeting.GreetingError) as error:
            if self._problem != str(error):
                log.error("the pool's key cannot be read again: the old one stays", extra={"detail": str(error)})
            self._problem = str(error)
            return False
        self._problem = ""
        if key == self._keys[0]:
            return False
        self._keys = (key, *(old for old in self._keys if old != key))[:_MAX_KEYS]
        self._changed_s = time.monotonic()
        log.info("the pool has a new key: runners with the old one are replaced")
        return True


def to_replace(pool: RunnerPool, is_outdated: Callable[[str], bool]) -> list[Runner]:
    """The runners to replace now: a tenth of the pool at a time, at least one, those that no slot has first."""
    usable, wanted = pool.usable, pool.size + pool.spares
    going = sum(runner.is_outdated for runner in usable) + wanted - len(usable)
    found = [runner for runner in usable if not runner.is_outdated and is_outdated(runner.name)]
    return sorted(found, key=lambda one: one.state is RunnerState.LENT)[: max(0, max(1, wanted // 10) - going)]


def _read(path: Path) -> bytes:
    return greeting.read_key(path.read_text(encoding="utf8"))
