"""The configured address of Redis, and the same without its password."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from nouscoder.broker.errors import RedisAddressUnusable
from nouscoder.config import BrokerSection
from nouscoder.errors import why_unreadable, without_secrets

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")


def configured_url(section: BrokerSection) -> str:
    """redis_url, or the content of redis_url_file; empty when neither is configured. Raises RedisAddressUnusable."""
    if not section.redis_url_file:
        return section.redis_url
    path = Path(section.redis_url_file)
    try:
        url = path.read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RedisAddressUnusable(f"broker.redis_url_file {path} cannot be read: {why_unreadable(error)}") from error
    if url.partition("://")[0] not in SCHEMES:
        raise RedisAddressUnusable(f"broker.redis_url_file {path} holds no URL that begins with {SCHEMES[0]}://")
    return url


def without_password(url: str) -> str:
    """The URL for log lines and errors."""
    scheme, _, rest = url.partition("://")
    if "@" not in rest:
        return without_secrets(url)
    return f"{scheme}://{urlsplit(url).netloc.rpartition('@')[2]}{urlsplit(url).path}"
