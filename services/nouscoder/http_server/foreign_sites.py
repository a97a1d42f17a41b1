"""Which requests from browsers a service without API keys accepts. Pure.

Any web page can make a visitor's browser send requests to a service on the visitor's machine or network. Such a request
names the page in `Origin`. A page whose own DNS name is pointed at the service (DNS rebinding) shows that name in
`Host`. A service without keys refuses both, unless the name is configured.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

_PRIVATE_ENDINGS = (".localhost", ".local", ".internal", ".svc")  # no public DNS has names like these


def foreign_part(host: str | None, origin: str | None, names: Collection[str]) -> str | None:
    """The header ("Host" or "Origin") that names a foreign site; None when there is none.

    `host` and `origin` are the headers of a request, None when missing: programs that are not browsers send no Origin.
    `names` are the configured host names.
    """
    if host is not None and not _is_own(_name_of(f"//{host}"), names):
        return "Host"
    if origin is None or _name_of(origin) in names:
        return None
    try:
        parts = urlsplit(origin)
    except ValueError:
        return "Origin"
    same = parts.scheme in ("http", "https") and host is not None and parts.netloc.lower() == host.lower()
    return None if same else "Origin"


def _is_own(name: str, names: Collection[str]) -> bool:
    """Whether no foreign site can have this name: addresses, names without a dot, and private endings."""
    return name in names or bool(name and "." not in name) or name.endswith(_PRIVATE_ENDINGS) or _is_address(name)


@functools.lru_cache(maxsize=64)  # asked for every request
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name_of(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""
