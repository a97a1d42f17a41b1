"""What is made from files that are renewed while a service runs: certificates, keys, authorities.

INVARIANT: `current` never fails. While new files are incomplete, unreadable or do not belong together, the value of the
last usable ones stays.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

Made = TypeVar("Made")
Stamp = tuple[tuple[int, int, int], ...] | None


class Renewed(Generic[Made]):
    """A value and the files that it was made from."""

    def __init__(self, files: Sequence[str], make: Callable[[], Made]) -> None:
        """Raises what `make` raises."""
        self._files = [file for file in files if file]
        self._make = make
        self._stamp = self._seen()
        self._value = make()

    def current(self) -> Made:
        """The value of the newest usable files. Any thread may call it; it costs a stat of each file."""
        stamp = self._seen()
        if stamp is None or stamp == self._stamp:
            return self._value
        try:
            value = self._make()
        except Exception as error:
            log.error("renewed files cannot be used: the old ones stay", extra={"detail": str(error)})
            self._stamp = stamp
            return self._value
        if self._seen() == stamp:  # otherwise they were replaced meanwhile: the next call reads them again
            self._stamp, self._value = stamp, value
            log.info("renewed files are in use", extra={"files": ", ".join(self._files)})
        return self._value

    def _seen(self) -> Stamp:
        """What changes when a file is written or replaced; None when one is missing."""
        try:
            seen = [os.stat(file) for file in self._files]
        except OSError:
            return None
        return tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in seen)
