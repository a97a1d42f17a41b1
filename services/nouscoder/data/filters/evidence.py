"""What a step found out by grading or by asking a model, kept so that it is not asked again.

INVARIANT: a fact that was kept is never found out again, also after a kill: each is one line, flushed when it comes,
under a key that names all it depends on. A line that is torn is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


class Evidence:
    """The facts of one file, by key."""

    def __init__(self, facts: dict[str, str], file: TextIO) -> None:
        self._facts = facts
        self._file = file

    def get(self, key: str) -> str | None:
        """What is known."""
        return self._facts.get(key)

    def keep(self, key: str, fact: str) -> None:
        """Keep a fact."""
        self._facts[key] = fact
        self._file.write(json.dumps([key, fact]) + "\n")
        self._file.flush()


@contextmanager
def opened_evidence(path: Path) -> Iterator[Evidence]:
    """The facts in a file, which is made when it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    facts: dict[str, str] = {}
    with path.open("a+", encoding="utf8") as file:
        file.seek(0)
        end = 0
        for line in file:
            if not line.endswith("\n"):
                break
            key, fact = json.loads(line)
            facts[key] = fact
            end += len(line.encode())
        file.truncate(end)
        yield Evidence(facts, file)
