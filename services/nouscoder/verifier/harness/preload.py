"""What a slot's interpreter imports before any candidate comes: what short programs use most.

More modules make every fork dearer (about 10 us each here), fewer make programs that need them pay the import.
"""

from __future__ import annotations

import importlib

MODULES = (
    "math collections heapq bisect itertools functools string re random operator copy io os time "
    "typing datetime decimal fractions json threading queue array struct statistics "
    "marshal atexit select signal resource"
)


def preload(extra: tuple[str, ...] = ()) -> None:
    """Import them. `extra` are modules of the configured site folders; one that is missing raises ImportError."""
    for name in (*MODULES.split(), *extra):
        importlib.import_module(name)
