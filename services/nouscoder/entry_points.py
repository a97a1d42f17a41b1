"""Code of the user that the configuration or a command names as `package.module:name`.

It is imported only where it runs, so that the other services need not have its package.
"""

from __future__ import annotations

import pkgutil
from typing import Any

from nouscoder.errors import Unusable

PATTERN = r"^[\w.]+:\w+$"  # package.module:name


def load_entry_point(key: str, entry_point: str) -> Any:
    """What `package.module:name` names. Raises Unusable, whatever its module raises; `key` is where it was given."""
    try:
        return pkgutil.resolve_name(entry_point)
    except Exception as error:
        raise Unusable(f"{key} {entry_point!r} cannot be loaded: {error}") from error
