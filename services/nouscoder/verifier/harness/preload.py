"""The modules that a slot's interpreter imports before any candidate runs: those that short programs use most.

Each module makes every fork slower (about 10 us). A module that is not preloaded costs its import in every program.
"""

from __future__ import annotations

import importlib

MODULES = (
    "math collections heapq bisect itertools functools string re random operator copy io os time "
    "typing datetime decimal fractions json threading queue array struct statistics "
    "marshal atexit select signal resource"
)


def preload(extra: tuple[str, ...] = ()) -> None:
    """Import the modules. `extra` are modules of the configured site folders. Raises ImportError for a missing one."""
    for name in (*MODULES.split(), *extra):
        importlib.import_module(name)
