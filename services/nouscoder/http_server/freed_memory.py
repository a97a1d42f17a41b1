"""What the C library keeps of freed memory, and how a service gives it back to the system.

glibc takes blocks of up to 32 MiB from its heap once it has freed such a block, and gives the heap back from its end
only. One small block behind the body of a request then keeps the room of that body: 200 MiB after some minutes.
"""

from __future__ import annotations

import asyncio
import ctypes
from mmap import PAGESIZE
from pathlib import Path

LARGE_BYTES = 256 * 1024
GROWN_BYTES, _TRIM_S = 64 * 1024**2, 0.5
_M_MMAP_THRESHOLD = -3  # of <malloc.h>


def return_large_blocks() -> bool:
    """Take each block of LARGE_BYTES or more from the system itself. Returns False without glibc, and does nothing."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES))


async def return_freed_memory() -> None:
    """Give free blocks back to the system whenever the process has grown by GROWN_BYTES, for ever.

    gRPC reads the frames of a connection into small blocks of many threads: a flood that it ends kept 1.4 GiB of them.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    least = held_bytes()
    while trim is not None:
        await asyncio.sleep(_TRIM_S)
        if held_bytes() > least + GROWN_BYTES:
            await asyncio.to_thread(trim, 0)
            least = held_bytes()
        least = min(least, held_bytes())


def held_bytes() -> int:
    """The resident memory of this process."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * PAGESIZE
