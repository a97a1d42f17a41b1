"""Decodes large texts without the garbage collector.

INVARIANT: the garbage collector is off while any thread is inside `without_collections`, and afterwards as it was.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_inside = 0
_was_enabled = False


@contextmanager
def without_collections() -> Iterator[None]:
    """Turn the garbage collector off. While a million lists are decoded it would start again and again, which takes
    three times as long as the decoding.
    """
    global _inside, _was_enabled
    with _lock:
        if not _inside:
            _was_enabled = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _was_enabled:
                gc.enable()
