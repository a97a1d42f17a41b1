"""TensorBoard: event files in sinks/tensorboard of the run folder (`tensorboard --logdir runs`).

A record is one event with all its scalars, which is in the file as a whole or not at all, so the files themselves say
which step is the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoardSink:
    """Writes event files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def open(self) -> int:
        """Read the last step of earlier files, and begin a new file."""
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        steps = [
            event.step
            for file in sorted(self._folder.glob("events.out.tfevents.*"))
            for event in LegacyEventFileLoader(str(file)).Load()
            if event.HasField("summary")
        ]
        self._writer = EventFileWriter(str(self._folder))
        return max(steps, default=0)

    def write(self, step: int, time_s: float, scalars: Mapping[str, float]) -> None:
        """Add one event."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._writer.add_event(Event(wall_time=time_s, step=step, summary=Summary(value=values)))

    def flush(self) -> None:
        """Write what is buffered to the file."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
