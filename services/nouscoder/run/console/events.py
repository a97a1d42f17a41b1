"""The events of a run's feed, for one reader.

`stream` sends a browser the events of a run, in the form of server-sent events:

| event | contents |
|---|---|
| run | name of the run |
| state | what the views are told: phase, figures, ledger, what blocks, processes, sentences |
| points | new points of the charts (report/follow.py); their `id` is the position to go on from |
| evaluations | all evaluations, when there is a new one |
| rollouts | the batches whose tokens are there, when there is a new one |
| summary | summary.json and its ledger, when the run has ended; null when it goes on |

INVARIANT: an event carries what is new since the one of its kind before, and is sent at most once in TICK_S. A reader
that comes back with the id of its last event gets every point since. A stream ends when the pages close, after
LONGEST_S, or when its reader takes nothing; the browser then comes back by itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nouscoder.atomic_files import numbered
from nouscoder.input_file import json_object
from nouscoder.report.follow import METRICS, Evaluations, NewLines, Position
from nouscoder.report.page import ledger_of
from nouscoder.run.console.feed import Feed, ledger_record

TICK_S = 1.0
LONGEST_S = 3600.0
_BEAT_S = 10.0  # a comment at least this often shows that the other side is there
_BEAT = b": still here\n\n"
_COME_BACK = b"retry: 2000\n\n"
_MOST_BESIDE = 100


def stream(folder: Path, position: Position, feed: Feed, *, is_own: bool) -> Iterator[bytes]:
    """The events of the run in `folder`, until the feed closes. `is_own`: it is the run that tells the feed."""
    end_s = time.monotonic() + LONGEST_S
    sent_s = time.monotonic()
    news = _News(folder, position, feed if is_own else None)
    yield _COME_BACK + _event("run", {"name": folder.name})
    while not feed.closed.is_set() and (now_s := time.monotonic()) < end_s:
        for event in news.look():
            sent_s = now_s
            yield event
        if now_s - sent_s >= _BEAT_S:
            sent_s = now_s
            yield _BEAT
        feed.closed.wait(TICK_S)


class _News:
    """What one reader has not got yet."""

    def __init__(self, folder: Path, position: Position, feed: Feed | None) -> None:
        self._folder = folder
        self._feed = feed
        self._version = -1
        self._lines = NewLines(folder / METRICS, position)
        self._evaluations = Evaluations(folder)
        self._batches: list[int] | None = None
        self._ended: int | None = -1

    def look(self) -> Iterator[bytes]:
        ended = _changed_ns(self._folder / "summary.json")
        if ended != self._ended:
            self._ended = ended
            yield _event("summary", None if ended is None else _summary(self._folder))
        if self._feed is not None and self._feed.version != self._version:
            self._version, text = self._feed.state()
            yield _sent("state", text)
        for found in self._lines.read():
            yield _event("points", {"after": found.after, "charts": found.charts}, found.position)
        if (evaluated := self._evaluations.read(self._lines.steps)) is not None:
            yield _event("evaluations", {"charts": evaluated.charts, "rows": evaluated.rows})
        if self._feed is not None and (batches := [*numbered(self._folder / "tokens", ".json")]) != self._batches:
            self._batches = batches
            yield _event("rollouts", {"batches": batches})


def _changed_ns(file: Path) -> int | None:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None


def _summary(folder: Path) -> dict[str, Any]:
    record = json_object(folder / "summary.json")
    ledger = ledger_of(record)
    names = ("steps", "pass_at_1_before", "pass_at_1_after", "learning_seconds")
    return {name: record.get(name) for name in names} | {"ledger": None if ledger is None else ledger_record(ledger)}


def _event(kind: str, record: object, position: Position | None = None) -> bytes:
    return _sent(kind, json.dumps(record, separators=(",", ":")), position)


def _sent(kind: str, text: str, position: Position | None = None) -> bytes:
    """`text` is JSON, so it has no line break."""
    named = "" if position is None else f"id: {position}\n"
    return f"event: {kind}\n{named}data: {text}\n\n".encode("utf8", "backslashreplace")


def runs_beside(folder: Path) -> dict[str, Path]:
    """The other runs in the same root, by name, the newest first. Links are left out."""
    found = []
    for path in folder.parent.iterdir():
        if path == folder or path.is_symlink():
            continue
        if (changed_ns := _changed_ns(path / METRICS)) is not None:
            found.append((changed_ns, path))
    return {path.name: path for _, path in sorted(found, reverse=True)[:_MOST_BESIDE]}
