"""How a gateway and a runner get to know each other before a connection becomes a slot's stream.

    runner   -> gateway   MAGIC, a nonce
    gateway  -> runner    a nonce, proof(key, "gateway", both nonces, request), request
    runner   -> gateway   proof(key, "runner", both nonces, answer), answer

Each side proves that it has the pool's key, over nonces of both, so that neither a stranger nor a recorded greeting is
believed; the key itself never crosses the wire. Requests and answers are JSON objects behind their length. With an
answer of status `ok` the connection is the stdin and stdout of a fresh harness.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from typing import Any

MAGIC = b"NCR1"
NONCE_BYTES = 32
PROOF_BYTES = 32
LENGTH = struct.Struct("!I")
MAX_MESSAGE_BYTES = 1 << 16
LIMIT_S = 5.0  # of a whole greeting
DEFAULT_PORT = 7070

OK, BUSY, REFUSED = "ok", "busy", "refused"
SLOT, PARTNER, RETIRE = "slot", "partner", "retire"  # what a gateway may want


class GreetingError(Exception):
    """The other side is not what it says, or speaks another language."""


def proof(key: bytes, side: str, runner_nonce: bytes, gateway_nonce: bytes, message: bytes) -> bytes:
    """That `side` has the key and says `message` now."""
    spoken = b"\0".join((side.encode(), runner_nonce.hex().encode(), gateway_nonce.hex().encode(), message))
    return hmac.new(key, spoken, hashlib.sha256).digest()


def check_proof(given: bytes, key: bytes, side: str, runner_nonce: bytes, gateway_nonce: bytes, message: bytes) -> None:
    """Raises GreetingError, in the same time whatever is wrong."""
    if not hmac.compare_digest(given, proof(key, side, runner_nonce, gateway_nonce, message)):
        raise GreetingError(f"the {side} does not have this pool's key")


def pack(message: dict[str, Any]) -> bytes:
    """JSON, without its length."""
    return json.dumps(message).encode()


def unpack(text: bytes) -> dict[str, Any]:
    """Inverse of `pack`. Raises GreetingError."""
    try:
        message = json.loads(text)
    except ValueError as error:
        raise GreetingError("a greeting that is not JSON") from error
    if not isinstance(message, dict):
        raise GreetingError("a greeting that is no JSON object")
    return message


def message_length(header: bytes) -> int:
    """From the bytes of LENGTH. Raises GreetingError for more than MAX_MESSAGE_BYTES."""
    (length,) = LENGTH.unpack(header)
    if length > MAX_MESSAGE_BYTES:
        raise GreetingError(f"a greeting of {length} bytes")
    return int(length)


def read_key(text: str) -> bytes:
    """The pool's key from its text, which is hashed, so that any text of 16 characters or more will do.

    Raises GreetingError for a shorter one.
    """
    stripped = text.strip()
    if len(stripped) < 16:
        raise GreetingError("the pool's key must have at least 16 characters")
    return hashlib.sha256(stripped.encode()).digest()
