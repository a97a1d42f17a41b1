"""Handles large texts beside an event loop: without the garbage collector, and with breaks for the loop.

INVARIANT: the garbage collector is off while any thread is inside `without_collections`, and afterwards as it was.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LONG_BYTES = 256 * 1024  # of a text; the interpreter runs nothing else while one call handles it
_BREAK_S = 0.005

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


def give_way(num_bytes: int) -> None:
    """Let the event loop have a few turns, in another thread, after a call that handled so many bytes.

    The loop takes the interpreter's lock anew for each turn, and an answer needs several. Without breaks it would wait
    for several long calls.
    """
    if num_bytes > LONG_BYTES and threading.current_thread() is not threading.main_thread():
        time.sleep(_BREAK_S)
