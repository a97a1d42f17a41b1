"""Reads a pickle that holds one text, and refuses every other without running anything.

The pickle is never loaded. Its operations are listed (pickletools.genops), and only those that a pickled text consists
of are allowed; operations that import names or call them are among the others.
"""

from __future__ import annotations

import pickletools
import warnings

_TEXT = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"})
_HARMLESS = frozenset({"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"})


class UnsafePickle(ValueError):
    """The pickle holds something other than one text. The text names the operation."""


def text_of_pickle(data: bytes) -> str:
    """The text. Raises UnsafePickle, and ValueError for data that is not a whole pickle."""
    found: str | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of wrong escapes in operations that are refused
        for operation, argument, position in pickletools.genops(data):
            if operation.name in _TEXT and found is None:
                found = str(argument)
            elif operation.name not in _HARMLESS:
                raise UnsafePickle(f"operation {operation.name} at byte {position}: only one text is allowed")
    if found is None:
        raise UnsafePickle("the pickle holds no text")
    return found
