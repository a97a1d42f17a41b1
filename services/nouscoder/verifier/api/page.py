"""A page or a script that the service sends to browsers."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Page:
    """The text and its HTTP headers."""

    text: str
    headers: dict[str, str]


def headers_of(cache: str, policy: str = "") -> dict[str, str]:
    """The headers of a page: how long browsers keep it, and its Content-Security-Policy."""
    headers = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": cache}
    return headers | {"Content-Security-Policy": policy} if policy else headers


def digest_source(text: str) -> str:
    """The digest of a script or a style sheet as a Content-Security-Policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf8")).digest()).decode()
