"""Gives large blocks of memory back to the system when they are free.

glibc takes blocks of up to 32 MiB from its heap once it has freed such a block, and gives the heap back from its end
only. One small block behind the body of a request then keeps the room of that body: 200 MiB after some minutes.
"""

from __future__ import annotations

import ctypes

LARGE_BYTES = 256 * 1024
_M_MMAP_THRESHOLD = -3  # of <malloc.h>


def return_large_blocks() -> bool:
    """Take each block of LARGE_BYTES or more from the system itself. Returns False without glibc, and does nothing."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES))
