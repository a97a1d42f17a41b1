"""The rollouts of a round's tasks, each kept as it comes.

INVARIANT: a rollout is in the log before it is used, under a digest of its policy and of the whole task. A task with a
rollout is not sampled again.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Self

from nouscoder.domain.rollout import Rollout, Task
from nouscoder.record_log import RecordLog, key_of
from nouscoder.store.rollout_record import decode_rollout, encode_rollout

# Samples tasks, and gives each rollout to its second argument when it ends.
Sample = Callable[[Sequence[Task], Callable[[Rollout], object]], Awaitable[None]]


class RolloutLog:
    """The rollouts of one file. `policy` is the digest of the weights that sample them."""

    def __init__(self, path: Path, policy: str) -> None:
        """Raises LogUnusable and StorageError."""
        self._log = RecordLog(path, "record")
        self._policy = policy

    async def make(self, tasks: Sequence[Task], sample: Sample, progress: Callable[[int, int], None]) -> None:
        """Sample the tasks that have no rollout yet. Raises what `sample` raises."""
        keys = {task.rollout_id: self._key(task) for task in tasks}
        missing = {task.rollout_id: task for task in tasks if keys[task.rollout_id] not in self._log}
        left = set(missing)

        def took(rollout: Rollout) -> None:
            _, record = encode_rollout(rollout)
            self._log.add(keys[rollout.rollout_id], {"record": b64encode(record).decode()})
            left.discard(rollout.rollout_id)
            progress(len(keys) - len(left), len(keys))

        if missing:
            await sample([*missing.values()], took)

    def of(self, task: Task) -> Rollout:
        """The rollout of this task. Raises KeyError before it was made."""
        return decode_rollout(b64decode(self._log.get(self._key(task))["record"]))

    def all(self) -> list[Rollout]:
        """The rollouts in the order of their ids."""
        found = [decode_rollout(b64decode(self._log.get(key)["record"])) for key in self._log]
        return sorted(found, key=lambda rollout: rollout.rollout_id)

    def _key(self, task: Task) -> str:
        return key_of({"policy": self._policy, "task": asdict(task)})

    def close(self) -> None:
        """Close the file."""
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
