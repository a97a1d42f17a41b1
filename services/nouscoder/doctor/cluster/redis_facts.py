"""What an external Redis says of itself, and whether a run can rely on it."""

from __future__ import annotations

import base64
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import redis

from nouscoder.doctor.cluster.facts import ClusterError
from nouscoder.doctor.cluster.judge import unknown
from nouscoder.doctor.cluster.release_objects import PlannedPod
from nouscoder.doctor.cluster.target import Document, Target
from nouscoder.doctor.finding import Finding
from nouscoder.errors import NousCoderError

OLDEST = (6, 2)
_LIMIT_S = 5.0


class RedisSilent(NousCoderError):
    """Redis did not answer. The message has no password."""


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """Answers of INFO."""

    version: str
    policy: str
    append_only: bool
    max_bytes: int


def ask_redis(url: str, authority: str) -> RedisFacts:
    """Connect to `url`. `authority` is the PEM of ssl_ca_certs, whose path exists only in the broker's pod, or "".

    Raises RedisSilent.
    """
    if "+sentinel://" in url:
        raise RedisSilent("the URL names Sentinels, which only the broker follows")
    with tempfile.NamedTemporaryFile("w", suffix=".crt") as file:
        file.write(authority)
        file.flush()
        try:
            with redis.Redis.from_url(
                _with_authority(url, file.name if authority else ""),
                socket_timeout=_LIMIT_S,
                socket_connect_timeout=_LIMIT_S,
            ) as client:
                told = dict(client.info("everything"))
        except (redis.RedisError, OSError, ValueError) as error:
            raise RedisSilent(f"{_without_password(url)} does not answer here: {_short(error)}") from None
    return RedisFacts(
        str(told.get("redis_version", "?")),
        str(told.get("maxmemory_policy", "?")),
        bool(told.get("aof_enabled", 0)),
        int(told.get("maxmemory", 0)),
    )


def _with_authority(url: str, path: str) -> str:
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    if path:
        query["ssl_ca_certs"] = path
    return urlunsplit(parts._replace(query=urlencode(query, safe="/")))


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def judge_redis(facts: RedisFacts) -> Finding:
    """Judge an external Redis, as docs/redis-keys.md asks for it."""
    detail = (
        f"{facts.version}, maxmemory-policy {facts.policy}, append-only file {'on' if facts.append_only else 'off'}"
    )
    fixes = []
    match = re.match(r"(\d+)\.(\d+)", facts.version)
    if match is None or (int(match[1]), int(match[2])) < OLDEST:
        fixes.append(f"Redis {'.'.join(map(str, OLDEST))} or newer")
    if facts.policy != "noeviction":
        fixes.append("maxmemory-policy noeviction, because an evicted key is a lost rollout")
    if not facts.append_only:
        fixes.append("appendonly yes, because a restart would else forget the run's state")
    if facts.max_bytes == 0:
        detail += ", no maxmemory: the run cannot wait before memory is full"
    return Finding("Redis", not fixes, True, detail, "; ".join(fixes))


def examine_redis(
    pods: Sequence[PlannedPod],
    objects: Sequence[Document],
    target: Target,
    asks: Callable[[str, str], RedisFacts],
) -> Iterator[Finding]:
    """Ask the Redis of a Secret that the install does not make: the broker's file redis/url."""
    found = _redis_secret(pods)
    own = {(one["metadata"].get("labels") or {}).get("app.kubernetes.io/component") for one in objects}
    if found is None or "redis" in own:
        return
    namespace, secret, url_key, authority_key = found
    try:
        stored = (target.read("secrets", namespace, secret) or {}).get("data") or {}
        if not stored.get(url_key):
            return  # The finding about the Secret says so.
        facts = asks(_decoded(stored[url_key]), _decoded(stored.get(authority_key, "")))
    except ClusterError as error:
        yield unknown("Redis", True, error)
    except RedisSilent as error:
        fix = "run this where that address can be reached, such as in a pod of the namespace"
        yield Finding("Redis", False, True, f"unknown: {error}", fix, known=False)
    else:
        yield judge_redis(facts)


def _redis_secret(pods: Sequence[PlannedPod]) -> tuple[str, str, str, str] | None:
    """(namespace, Secret, key of the URL, key of the authority's certificate or "") of the broker."""
    for pod in pods:
        for volume in pod.document["spec"].get("volumes") or ():
            for source in (volume.get("projected") or {}).get("sources", ()):
                paths = {item["path"]: item["key"] for item in (source.get("secret") or {}).get("items") or ()}
                if "redis/url" in paths:
                    return pod.namespace, source["secret"]["name"], paths["redis/url"], paths.get("redis/ca.crt", "")
    return None


def _decoded(text: str) -> str:
    return base64.b64decode(text).decode("utf8", "replace").strip()
