"""Tests that are too large for a request: the client stores them, and the request names their digest.

INVARIANT: tests are sent once for all requests with them, as long as the client is open and the service keeps them.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from nouscoder.client.errors import BadRequest

INLINE_BYTES = 8 * 1024**2  # of a request; the service refuses larger ones
JSON = {"Content-Type": "application/json"}
_MOST_KEPT = 4096


def encoded(record: Mapping[str, Any]) -> bytes:
    """The JSON of a record. The service reads half of a surrogate pair as U+FFFD.

    Raises BadRequest for a value that has no JSON form.
    """
    try:
        return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(record).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"the request has no JSON form: {error}") from None


def tests_to_store(record: Mapping[str, Any]) -> bytes | None:
    """The JSON of a request's tests; None when they are a digest already, or no tests."""
    tests = record.get("tests")
    if isinstance(tests, str):
        return tests.encode()
    return encoded(tests) if isinstance(tests, Mapping) and "digest" not in tests else None


class StoredDigests:
    """The digests of tests that the service keeps, by the SHA-256 of their JSON. May be shared between threads."""

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, str] = OrderedDict()

    def of(self, tests: bytes) -> str | None:
        """The digest of tests that were stored before."""
        return self._digests.get(hashlib.sha256(tests).digest())

    def keep(self, tests: bytes, digest: str) -> str:
        """Remember the digest, and return it."""
        self._digests[hashlib.sha256(tests).digest()] = digest
        while len(self._digests) > _MOST_KEPT:
            self._digests.popitem(last=False)
        return digest

    def can_help(self, record: Mapping[str, Any], error: BadRequest) -> bool:
        """Whether a request that failed can succeed once its tests are stored, or stored again."""
        tests = tests_to_store(record) if error.status == 413 or error.field == "tests.digest" else None
        if tests is None:
            return False
        self._digests.pop(hashlib.sha256(tests).digest(), None)
        return True
