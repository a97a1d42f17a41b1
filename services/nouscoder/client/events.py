"""The server-sent events of POST /v1/grade/stream, line by line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import cast

from nouscoder.client.errors import DeadlinePassed, Unreachable
from nouscoder.client.records import GradeAnswer, OutcomeAnswer

Event = OutcomeAnswer | GradeAnswer


@dataclass(slots=True)
class EventReader:
    """Takes the lines of one stream. `begun`: an event came. `ended`: it was the verdict."""

    begun: bool = False
    ended: bool = False
    _name: str = ""

    def feed(self, line: str) -> Event | None:
        """The event that this line completes. Raises DeadlinePassed when it says that the deadline has passed."""
        name, _, value = line.partition(": ")
        if name == "event":
            self._name = value
        if name != "data":
            return None
        record = json.loads(value)
        if self._name == "fault":
            raise DeadlinePassed(str(record.get("detail")))
        self.begun, self.ended = True, self._name == "verdict"
        return cast("Event", record)

    def finish(self) -> None:
        """Call at the end of the stream. Raises Unreachable when the verdict is missing."""
        if not self.ended:
            raise Unreachable("the grading service ended the stream before the verdict")
