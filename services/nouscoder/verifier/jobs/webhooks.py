"""The server that a job names is told of the job's end: a POST of its state, signed.
`X-NousCoder-Signature: t=SECONDS,v1=HEX`, where HEX is the HMAC-SHA256 of "SECONDS.BODY" with the key that the operator
shares with that server. A receiver should refuse an old SECONDS.

INVARIANT: a request goes only to an origin (scheme, host and port) that the operator configured; redirects and proxies
are not followed. Each job is told at least once, unless every one of `_TRIES` tries failed. A client has at most
`_AT_ONCE` requests in progress, so that its servers, when they do not answer, keep no other client waiting. A wait
between two tries takes nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Collection
from urllib.parse import urlsplit

import httpx

from nouscoder.errors import NousCoderError
from nouscoder.retry import Retry
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.jobs.folder import JobFolder, WebhookState

log = logging.getLogger(__name__)

SIGNATURE = "X-NousCoder-Signature"
_TRIES = 8
_PATIENCE_S = 10.0
_AT_ONCE, _AT_ONCE_OF_ALL = 2, 64
_PORTS = {"http": 80, "https": 443}


class NotDelivered(NousCoderError):
    """The server did not answer with a status of 2xx."""


def origin_of(url: str) -> str:
    """The origin of a URL, such as https://host:443. Raises ValueError when it has none, or a user name."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname or parts.username is not None or parts.password is not None:
        raise ValueError("must be an http or https URL without a user name")
    if any(ord(letter) <= 32 or ord(letter) > 126 or letter == "\\" for letter in url):
        raise ValueError("must be plain ASCII")
    return f"{parts.scheme}://{parts.hostname.lower()}:{parts.port or _PORTS[parts.scheme]}"


def signature(key: bytes, seconds: int, body: bytes) -> str:
    """The value of the header for this body."""
    digest = hmac.new(key, f"{seconds}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={seconds},v1={digest}"


class Webhooks:
    """Tells servers of `origins`, with `key`. `keep_s` is how long jobs are kept after their end."""

    def __init__(
        self,
        origins: Collection[str],
        key: bytes,
        keep_s: float,
        transport: httpx.AsyncBaseTransport | None = None,
        wait_s: float = 1.0,
    ) -> None:
        """`transport` takes the place of the network; `wait_s` is the first wait between two tries.

        Raises ValueError for an origin that is none.
        """
        self._origins = frozenset(map(origin_of, origins))
        self._key = key
        self._keep_s = keep_s
        self._transport = transport
        self._retry = Retry("telling a webhook", on=(NotDelivered,), max_tries=_TRIES, wait_s=wait_s, max_wait_s=300.0)
        self._of_client: dict[str, asyncio.Semaphore] = {}  # bounded by the number of client names with a key
        self._of_all = asyncio.Semaphore(_AT_ONCE_OF_ALL)

    def check(self, url: str) -> None:
        """Raises InvalidSubmission when this URL may not be called."""
        try:
            origin = origin_of(url)
        except ValueError as error:
            raise InvalidSubmission("webhook", str(error)) from None
        if origin not in self._origins:
            raise InvalidSubmission("webhook", f"{origin} is not in verifier.jobs.webhook_origins of this service")

    async def tell(self, job: JobFolder) -> None:
        """Tell the job's server, and write whether it knows. Raises StorageError."""
        try:
            self.check(job.record.options.webhook)  # the configuration may have changed since
            await self._retry.call(lambda: self._send_in_turn(job))
            state = WebhookState.DELIVERED
        except (NotDelivered, InvalidSubmission) as error:
            log.warning("webhook not delivered", extra={"job": job.record.job_id, "detail": str(error)})
            state = WebhookState.FAILED
        async with job.lock:
            if not job.is_removed:
                await asyncio.to_thread(job.tell, state)
        job.notify()

    async def _send_in_turn(self, job: JobFolder) -> None:
        own = self._of_client.setdefault(job.record.client, asyncio.Semaphore(_AT_ONCE))
        async with own, self._of_all:
            # One try.
            body = job.answer(self._keep_s).model_dump_json(exclude={"webhook"}).encode()
            headers = {"Content-Type": "application/json", SIGNATURE: signature(self._key, int(time.time()), body)}
            client = httpx.AsyncClient(
                timeout=_PATIENCE_S, follow_redirects=False, trust_env=False, transport=self._transport
            )
            try:
                async with asyncio.timeout(2 * _PATIENCE_S), client:
                    sent = client.stream("POST", job.record.options.webhook, content=body, headers=headers)
                    async with sent as answer:  # its body is not read
                        if not answer.is_success:
                            raise NotDelivered(f"HTTP {answer.status_code}")
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
                raise NotDelivered(f"{type(error).__name__}: {error}") from error
