"""Tokens of clients: only their SHA-256 is stored, one a line, in a file or in the environment.

    client-name:sha256hex[:max_in_flight[:submissions_per_minute]]

INVARIANT: a file that cannot be read or has a bad line never changes who is let in: the tokens known before stay in
force until it is right again. No tokens configured at all lets everybody in, a file without a token lets in nobody.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nouscoder.errors import Unusable
from nouscoder.verifier.access.caller import Quota

log = logging.getLogger(__name__)

ENVIRONMENT = "NOUSCODER_VERIFIER_TOKENS"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LOOK_AGAIN_S = 0.5
_MAX_SECRET_CHARS = 512


class ApiKeysUnusable(Unusable):
    """The configured tokens cannot be used; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One stored token: never the secret itself."""

    client: str
    digest: bytes
    quota: Quota


def new_api_key(client: str) -> tuple[str, str]:
    """(secret to hand to the client, line to store). Raises ApiKeysUnusable for a name that cannot be stored."""
    if not _NAME.fullmatch(client):
        raise ApiKeysUnusable(f"{client!r:.80} is no client's name: use letters, digits, '.', '_' and '-', at most 64")
    secret = f"nc_{secrets.token_urlsafe(32)}"
    return secret, f"{client}:{_digest(secret).hex()}"


def parse_api_keys(lines: Iterable[str], source: str) -> tuple[ApiKey, ...]:
    """Tokens of a file's lines; empty lines and lines with # are skipped. Raises ApiKeysUnusable naming the line."""
    tokens = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            tokens.append(_api_key(line.strip(), f"{source}:{number}"))
    return tuple(tokens)


def _api_key(line: str, where: str) -> ApiKey:
    name, digest, *quota = line.split(":")[:5] if line.count(":") else (line, "")
    if not _NAME.fullmatch(name) or not _DIGEST.fullmatch(digest) or len(quota) > 2:
        raise ApiKeysUnusable(f"{where}: not client-name:sha256hex[:max_in_flight[:submissions_per_minute]]")
    if not all(not part or (part.isascii() and part.isdigit() and int(part) > 0) for part in quota):
        raise ApiKeysUnusable(f"{where}: a quota must be a positive number or empty")
    bounds = [int(part) if part else None for part in (*quota, "", "")][:2]
    return ApiKey(name, bytes.fromhex(digest), Quota(*bounds))


class ApiKeys:
    """Says whose a secret is. Looks at the file again when it changed, at most twice a second, and on `reload`."""

    def __init__(self, file: Path | None = None, environment: str | None = None) -> None:
        """Raises ApiKeysUnusable when what is configured cannot be read."""
        self._file = file
        self._fixed = parse_api_keys(environment.split(), ENVIRONMENT) if environment else ()
        self._seen: tuple[int, ...] | None = None
        self._looked_s = time.monotonic()
        self._keys = self._fixed
        if file is not None:
            self._seen = _fingerprint(file)
            self._keys = (*self._fixed, *_read(file))
        self.is_open = file is None and not environment

    @property
    def num_keys(self) -> int:
        """Tokens in force."""
        return len(self._keys)

    def find(self, secret: str) -> ApiKey | None:
        """The token that `secret` is, in a time that tells nothing of the stored ones; None when it is none."""
        self._look()
        given = _digest(secret[:_MAX_SECRET_CHARS])
        found = None
        for token in self._keys:
            if hmac.compare_digest(token.digest, given):
                found = token  # no early end: how long it takes does not say which one matched
        return found

    def reload(self) -> None:
        """Read the file again now; on a fault the tokens known before stay in force, and a log line says so."""
        if self._file is None:
            return
        try:
            seen = _fingerprint(self._file)
            self._keys = (*self._fixed, *_read(self._file))
            self._seen = seen
            log.info("tokens read", extra={"num_keys": len(self._keys)})
        except ApiKeysUnusable as error:
            log.error("tokens not read, those known before stay in force", extra={"detail": str(error)})

    def _look(self) -> None:
        now_s = time.monotonic()
        if self._file is None or now_s - self._looked_s < _LOOK_AGAIN_S:
            return
        self._looked_s = now_s
        try:
            seen = _fingerprint(self._file)
        except ApiKeysUnusable as error:
            log.error("tokens not read, those known before stay in force", extra={"detail": str(error)})
            return
        if seen != self._seen:
            self.reload()
            self._seen = seen  # a file at fault is complained of once, not twice a second


def open_api_keys(file: str) -> ApiKeys:
    """The api_keys of the configured file and the environment; empty texts are none. Raises ApiKeysUnusable."""
    api_keys = ApiKeys(Path(file) if file else None, os.environ.get(ENVIRONMENT))
    if api_keys.is_open:
        log.warning("no tokens are configured: everybody who reaches this address may submit programs")
    else:
        log.info("tokens are asked for", extra={"num_keys": api_keys.num_keys})
    return api_keys


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf8", "surrogatepass")).digest()


def _fingerprint(file: Path) -> tuple[int, ...]:
    try:
        stat = file.stat()
    except OSError as error:
        raise ApiKeysUnusable(f"{file} cannot be read: {error.strerror or error}") from error
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _read(file: Path) -> tuple[ApiKey, ...]:
    try:
        return parse_api_keys(file.read_text("utf8").splitlines(), str(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ApiKeysUnusable(f"{file} cannot be read: {reason}") from error
