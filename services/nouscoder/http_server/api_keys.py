"""Which clients may send requests: those with an API key, or all when no keys are configured.

Only the SHA-256 of a key is stored, one per line, in a file or in the environment:

    client-name:sha256hex[:max_in_flight[:submissions_per_minute]]

INVARIANT: a file that cannot be read or has an invalid line changes nothing: the keys read before stay valid until the
file is correct again. If no keys are configured at all, every request is admitted. A file without a key admits none.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nouscoder.errors import Unusable, why_unreadable
from nouscoder.input_file import regular

log = logging.getLogger(__name__)

ENVIRONMENT = "NOUSCODER_VERIFIER_TOKENS"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHECK_INTERVAL_S = 0.5
_MAX_SECRET_CHARS = 512


class ApiKeysUnusable(Unusable):
    """The configured API keys cannot be used. The message names the file and the line."""


@dataclass(frozen=True, slots=True)
class Quota:
    """The quota of one API key. None means no limit."""

    max_in_flight: int | None = None
    submissions_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One stored key: its digest, never the secret itself."""

    client: str
    digest: bytes
    quota: Quota


def new_api_key(client: str) -> tuple[str, str]:
    """Make a key: (secret for the client, line to store). Raises ApiKeysUnusable for an invalid client name."""
    if not _NAME.fullmatch(client):
        raise ApiKeysUnusable(
            f"{client!r:.80} is not a valid client name: use at most 64 letters, digits, '.', '_' and '-'"
        )
    secret = f"nc_{secrets.token_urlsafe(32)}"
    return secret, f"{client}:{_digest(secret).hex()}"


def parse_api_keys(lines: Iterable[str], source: str) -> tuple[ApiKey, ...]:
    """The keys in these lines. Empty lines and comments (#) are skipped. Raises ApiKeysUnusable naming the line."""
    keys = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            keys.append(_api_key(line.strip(), f"{source}:{number}"))
    return tuple(keys)


def _api_key(line: str, where: str) -> ApiKey:
    name, digest, *quota = line.split(":")[:5] if line.count(":") else (line, "")
    if not _NAME.fullmatch(name) or not _DIGEST.fullmatch(digest) or len(quota) > 2:
        raise ApiKeysUnusable(f"{where}: expected client-name:sha256hex[:max_in_flight[:submissions_per_minute]]")
    if not all(not part or (part.isascii() and part.isdigit() and int(part) > 0) for part in quota):
        raise ApiKeysUnusable(f"{where}: a quota must be a positive number or empty")
    bounds = [int(part) if part else None for part in (*quota, "", "")][:2]
    return ApiKey(name, bytes.fromhex(digest), Quota(*bounds))


class ApiKeys:
    """Finds the key of a secret. Reads the file again on `reload` and when it has changed (checked twice a second)."""

    def __init__(self, file: Path | None = None, environment: str | None = None) -> None:
        """Raises ApiKeysUnusable when the configured keys cannot be read."""
        self._file = file
        self._fixed = parse_api_keys(environment.split(), ENVIRONMENT) if environment else ()
        self._fingerprint: tuple[int, ...] | None = None
        self._checked_s = time.monotonic()
        self._keys = self._fixed
        if file is not None:
            self._fingerprint = _fingerprint_of(file)
            self._keys = (*self._fixed, *_read(file))
        self.is_open = file is None and not environment

    @property
    def num_keys(self) -> int:
        """The number of valid keys."""
        return len(self._keys)

    def find(self, secret: str) -> ApiKey | None:
        """The key of `secret`, or None. The time taken does not depend on the stored keys."""
        self._reload_if_changed()
        digest = _digest(secret[:_MAX_SECRET_CHARS])
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key  # the loop continues, so that the time taken does not show which key matched
        return found

    def reload(self) -> None:
        """Read the file again now. On a fault the earlier keys stay valid and an error is logged."""
        if self._file is None:
            return
        try:
            fingerprint = _fingerprint_of(self._file)
            self._keys = (*self._fixed, *_read(self._file))
            self._fingerprint = fingerprint
            log.info("API keys read", extra={"num_keys": len(self._keys)})
        except ApiKeysUnusable as error:
            _log_kept(error)

    def _reload_if_changed(self) -> None:
        now_s = time.monotonic()
        if self._file is None or now_s - self._checked_s < _CHECK_INTERVAL_S:
            return
        self._checked_s = now_s
        try:
            fingerprint = _fingerprint_of(self._file)
        except ApiKeysUnusable as error:
            _log_kept(error)
            return
        if fingerprint != self._fingerprint:
            self.reload()
            self._fingerprint = fingerprint  # so that an invalid file is logged once, not twice a second


def open_api_keys(file: str) -> ApiKeys:
    """The keys of the configured file ("" for none) and of the environment. Raises ApiKeysUnusable."""
    api_keys = ApiKeys(Path(file) if file else None, os.environ.get(ENVIRONMENT))
    if api_keys.is_open:
        log.warning("no API keys are configured: anyone who can reach this address may submit programs")
    else:
        log.info("requests need an API key", extra={"num_keys": api_keys.num_keys})
    return api_keys


def _log_kept(error: ApiKeysUnusable) -> None:
    log.error("API keys not read, the earlier ones stay valid", extra={"detail": str(error)})


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf8", "surrogatepass")).digest()


def _fingerprint_of(file: Path) -> tuple[int, ...]:
    try:
        stat = file.stat()
    except OSError as error:
        raise ApiKeysUnusable(f"{file} cannot be read: {error.strerror or error}") from error
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _read(file: Path) -> tuple[ApiKey, ...]:
    try:
        return parse_api_keys(regular(file).read_text("utf-8-sig").splitlines(), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ApiKeysUnusable(f"{file} cannot be read: {why_unreadable(error)}") from error


def client_of(address: tuple[str, int] | None) -> str:
    """The name of a client without a key: its address, or the network of one address of IPv6, which has very many."""
    host = "" if address is None else address[0]
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host
    if found.version == 4 or found.ipv4_mapped is not None:
        return host
    return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))
