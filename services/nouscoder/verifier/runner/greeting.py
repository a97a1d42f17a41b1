"""The handshake of a gateway and a runner, before a connection becomes the stream of a slot.

    runner   -> gateway   MAGIC, a nonce
    gateway  -> runner    a nonce, proof(key, "gateway", both nonces, certificate, request), request
    runner   -> gateway   proof(key, "runner", both nonces, certificate, answer), answer

It runs inside TLS. Each side proves that it has the pool's key. The proof covers the nonces of both sides, so that a
recorded handshake is useless to an attacker, and the digest of the runner's certificate (the channel binding of RFC
5929, tls-server-end-point), so that a peer between the two cannot pass proofs on. The key itself is never sent.
Behind a tunnel whose own certificate the gateway checks, the digest is empty. Requests and answers are JSON objects
after their length.
After an answer with status `ok` the connection is the stdin and stdout of a fresh harness.

A request has `want` (slot, partner, checker or retire), `settings` (of the slot), `environment` (of the harness), and
`tools` and `search_path` (the programs to look for). An answer has `status`, `python`, `tools` (the paths of those
found), `peer` (whether a slot and its partner have a socket to each other) and `kernel` (`kernel.py`).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from typing import Any, NamedTuple

MAGIC = b"NCR2"
NONCE_BYTES = 32
PROOF_BYTES = 32
LENGTH = struct.Struct("!I")
MAX_MESSAGE_BYTES = 1 << 16
LIMIT_S = 5.0  # for a whole handshake
DEFAULT_PORT = 7070

OK, BUSY, REFUSED = "ok", "busy", "refused"
SLOT, PARTNER, CHECKER, RETIRE = "slot", "partner", "checker", "retire"  # the values of `want`
PARTNERS = (PARTNER, CHECKER)  # the further harnesses of a pair


class GreetingError(Exception):
    """The peer does not have the key, or does not follow the protocol."""


class Nonces(NamedTuple):
    """What makes a handshake unlike every other: 32 random bytes of each side, and the certificate's digest or b""."""

    runner: bytes
    gateway: bytes
    certificate: bytes = b""


def proof(key: bytes, side: str, nonces: Nonces, message: bytes) -> bytes:
    """The proof that `side` has the key and sends `message` in this handshake."""
    spoken = b"\0".join((side.encode(), *(part.hex().encode() for part in nonces), message))
    return hmac.new(key, spoken, hashlib.sha256).digest()


def check_proof(claimed: bytes, key: bytes, side: str, nonces: Nonces, message: bytes) -> None:
    """Raises GreetingError for a wrong proof. Compares in constant time."""
    if not hmac.compare_digest(claimed, proof(key, side, nonces, message)):
        raise GreetingError(f"the {side} does not have this pool's key, or another peer is between it and us")


def pack(message: dict[str, Any]) -> bytes:
    """The JSON of a message, without its length."""
    return json.dumps(message).encode()


def unpack(text: bytes) -> dict[str, Any]:
    """Inverse of `pack`. Raises GreetingError."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GreetingError("a message that is not JSON") from error
    if not isinstance(message, dict):
        raise GreetingError("a message that is not a JSON object")
    return message


def message_length(header: bytes) -> int:
    """The length in the bytes of LENGTH. Raises GreetingError for more than MAX_MESSAGE_BYTES."""
    (length,) = LENGTH.unpack(header)
    if length > MAX_MESSAGE_BYTES:
        raise GreetingError(f"a message of {length} bytes")
    return int(length)


def read_key(text: str) -> bytes:
    """The pool's key: the SHA-256 of its text. Raises GreetingError for a text of fewer than 16 characters."""
    stripped = text.strip()
    if len(stripped) < 16:
        raise GreetingError("the pool's key must have at least 16 characters")
    return hashlib.sha256(stripped.encode()).digest()
