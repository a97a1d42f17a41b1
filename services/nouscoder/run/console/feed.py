"""What the views of a run are told, for those who watch it in a browser.

`Feed` is itself a view: it passes everything on to the view of the terminal and keeps the newest of each, as the record
`state` says. The loop of the run tells it; the threads of the pages read it.

INVARIANT: nothing is computed before somebody watches, and one state is made into text once, however many watch. At
most MOST_WATCHERS watch; what is kept does not grow.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from nouscoder.domain.run_status import Ledger
from nouscoder.errors import without_secrets
from nouscoder.run.snapshot import Snapshot, duration, figures
from nouscoder.run.view import View

MOST_WATCHERS = 16
_MOST_SAID = 50


class TooManyWatch(Exception):
    """MOST_WATCHERS are watching."""


class Feed(View):
    """See the module. Without the `view` of a terminal it only keeps what it is told."""

    def __init__(self, view: View | None = None) -> None:
        self._view = view or View()
        self._told: Snapshot | tuple[str, int, int, str] | None = None
        self._said: deque[str] = deque(maxlen=_MOST_SAID)
        self.version = 0  # rises whenever it is told something
        self._lock = threading.Lock()
        self._num_watchers = 0
        self._text: tuple[int, str] = (-1, "")
        self.closed = threading.Event()

    # The view.

    @property
    def shows_blockers(self) -> bool:
        """Whether somebody watches."""
        return self._num_watchers > 0 or self._view.shows_blockers

    def show(self, snapshot: Snapshot) -> None:
        """Keep it, and show it in the terminal."""
        self._keep(snapshot)
        self._view.show(snapshot)

    def progress(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Keep it, and show it in the terminal."""
        self._keep((phase, done, total, note))
        self._view.progress(phase, done, total, note)

    def say(self, text: str) -> None:
        """Keep the sentence, and show it in the terminal."""
        with self._lock:
            self._said.append(text)
            self.version += 1
        self._view.say(text)

    def settle(self) -> None:
        """Leave what the terminal shows."""
        self._view.settle()

    def _keep(self, told: Snapshot | tuple[str, int, int, str]) -> None:
        with self._lock:
            self._told = told
            self.version += 1

    # Those who watch.

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Somebody watches inside the context. Raises TooManyWatch."""
        with self._lock:
            if self._num_watchers >= MOST_WATCHERS:
                raise TooManyWatch
            self._num_watchers += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_watchers -= 1

    def state(self) -> tuple[int, str]:
        """The state as JSON, and the version that it has."""
        with self._lock:
            if self._text[0] != self.version:
                record = _progress(self._told) if isinstance(self._told, tuple) else _state(self._told)
                record["said"] = [without_secrets(text) for text in self._said]
                self._text = (self.version, json.dumps(record, ensure_ascii=False))
            return self._text


def _state(snapshot: Snapshot | None) -> dict[str, Any]:
    if snapshot is None:
        return {"phase": "starting", "done": 0, "total": 0, "note": ""}
    return {
        "phase": snapshot.phase,
        "done": snapshot.step,
        "total": snapshot.total_steps,
        "note": "",
        "left": duration(snapshot.time_left_s),
        "figures": figures(snapshot),
        "ledger": None if snapshot.ledger is None else ledger_record(snapshot.ledger),
        "blockers": None if snapshot.blockers is None else [without_secrets(text) for text in snapshot.blockers],
        "processes": [asdict(process) for process in snapshot.processes],
        "learner": snapshot.learner_state,
    }


def _progress(told: tuple[str, int, int, str]) -> dict[str, Any]:
    phase, done, total, note = told
    return {"phase": phase, "done": done, "total": total, "note": without_secrets(note)}


def ledger_record(ledger: Ledger) -> dict[str, Any]:
    """The ledger, and whether it balances."""
    return asdict(ledger) | {"balanced": ledger.balanced}
