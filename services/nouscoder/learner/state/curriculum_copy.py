"""The learner's copy of the curriculum, from which a wiped Redis is restored.

INVARIANT: the file holds a complete state of this run, as the broker reported it. A copy that is missing,
damaged or old costs statistics, and some problems may be sampled again. It never stops a run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path

from nouscoder.atomic_files import StorageError, write_whole
from nouscoder.domain.curriculum import CurriculumState
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.channel import PeerError

log = logging.getLogger(__name__)

FILE = "curriculum.json"
_EVERY_S = 60.0


class CurriculumCopy:
    """The copy in a run folder, made again after a batch when the last one is a minute old.

    A broker that does not answer delays the learner by one attempt of at most 10 seconds.
    """

    def __init__(self, run_folder: Path, broker: BrokerClient) -> None:
        self._file = run_folder / FILE
        self._broker = broker
        self._made_at: float | None = None

    async def state(self) -> CurriculumState:
        """The state in the copy; an empty state when there is none."""
        try:
            return await asyncio.to_thread(read_copy, self._file) or CurriculumState()
        except ValueError as error:
            log.warning("the copy of the curriculum is damaged", extra={"file": str(self._file), "fault": str(error)})
            return CurriculumState()

    async def after_batch(self) -> None:
        """Make the copy again if it is due."""
        if self._made_at is None or time.monotonic() - self._made_at >= _EVERY_S:
            await self.now()

    async def now(self) -> None:
        """Make the copy again. A failure is logged: the next one holds all that this one would."""
        try:
            _, state = await self._broker.read_curriculum()
            data = await asyncio.to_thread(lambda: json.dumps(state.to_json()).encode())
            await asyncio.to_thread(write_whole, self._file, data)
        except (PeerError, StorageError) as error:
            log.warning("the curriculum was not copied", extra={"reason": str(error)})
        self._made_at = time.monotonic()


def read_copy(file: Path) -> CurriculumState | None:
    """The state in a copy; None when there is none. Raises ValueError when it is damaged."""
    try:
        found = json.loads(file.read_bytes())
        return CurriculumState.of_records(int(found["cursor"]), found["problems"].items())
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, AttributeError, OSError) as error:
        raise ValueError(f"{file} is not a copy of a curriculum: {error!r}") from error
