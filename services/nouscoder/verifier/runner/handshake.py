"""The handshake of a gateway and a runner, before a connection becomes the stream of a slot.

    runner   -> gateway   MAGIC, a nonce
    gateway  -> runner    a nonce, proof(key, "gateway", both nonces, certificate, request), request
    runner   -> gateway   proof(key, "runner", both nonces, certificate, answer), answer

It runs inside TLS. Each side proves that it has the pool's key. The proof covers the nonces of both sides, so that a
recorded handshake is useless to an attacker, and the digest of the runner's certificate (the channel binding of RFC
5929, tls-server-end-point), so that a peer between the two, which has another one, cannot pass proofs on. The key
itself is never sent.
Behind a tunnel whose own certificate the gateway checks, the digest is empty. Requests and answers are JSON objects
after their length.
After an answer with status `ok` the connection is the stdin and stdout of a fresh harness.

A request has `want` (slot, partner, checker or retire), `settings` (of the slot), `environment` (of the harness), and
`tools` and `search_path` (the programs to look for). An answer has `status`, `python`, `tools` (the paths of those
found), `peer` (whether a slot and its partner have a socket to each other) and `kernel` (`kernel.py`).

A runner makes a certificate of its own at each start, which no authority signs: the handshake replaces the authority.
TLS is 1.3 only, whose keys no later loss of the pool's key reveals. The private key is on no disk: /tmp of a runner is
memory, and the files are removed at once.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import ssl
import struct
import subprocess
import tempfile
from typing import Any, NamedTuple

MAGIC = b"NCR2"
NONCE_BYTES = 32
PROOF_BYTES = 32
LENGTH = struct.Struct("!I")
MAX_MESSAGE_BYTES = 1 << 16
LIMIT_S = 5.0  # for a whole handshake
DEFAULT_PORT = 7070

OK, BUSY = "ok", "busy"
SLOT, PARTNER, CHECKER, RETIRE = "slot", "partner", "checker", "retire"  # the values of `want`
PARTNERS = (PARTNER, CHECKER)  # the further harnesses beside that of a slot
_KINDS = ("ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
_LIMIT_S = 30.0


class HandshakeError(Exception):
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
    """Raises HandshakeError for a wrong proof. Compares in constant time."""
    if not hmac.compare_digest(claimed, proof(key, side, nonces, message)):
        raise HandshakeError(f"the {side} does not have this pool's key, or another peer is between it and us")


def pack(message: dict[str, Any]) -> bytes:
    """The JSON of a message, without its length."""
    return json.dumps(message).encode()


def unpack(text: bytes) -> dict[str, Any]:
    """Inverse of `pack`. Raises HandshakeError."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HandshakeError("a message that is not JSON") from error
    if not isinstance(message, dict):
        raise HandshakeError("a message that is not a JSON object")
    return message


def message_length(header: bytes) -> int:
    """The length in the bytes of LENGTH. Raises HandshakeError for more than MAX_MESSAGE_BYTES."""
    (length,) = LENGTH.unpack(header)
    if length > MAX_MESSAGE_BYTES:
        raise HandshakeError(f"a message of {length} bytes")
    return int(length)


def read_key(text: str) -> bytes:
    """The pool's key: the SHA-256 of its text. Raises HandshakeError for a text of fewer than 16 characters."""
    stripped = text.strip()
    if len(stripped) < 16:
        raise HandshakeError("the pool's key must have at least 16 characters")
    return hashlib.sha256(stripped.encode()).digest()


class NoCertificate(Exception):
    """The program openssl is missing or has failed."""


def own_certificate() -> tuple[ssl.SSLContext, bytes]:
    """The context of a server with a new certificate, and the certificate's digest. Raises NoCertificate."""
    with tempfile.TemporaryDirectory() as folder:
        key, certificate = os.path.join(folder, "key"), os.path.join(folder, "certificate")
        command = ["openssl", "req", "-x509", "-newkey", *_KINDS, "-nodes", "-days", "36500", "-subj", "/CN=runner"]
        try:
            subprocess.run(
                [*command, "-keyout", key, "-out", certificate],
                check=True,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_LIMIT_S,
                env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": folder, "RANDFILE": os.devnull},
            )
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or b"").decode(errors="replace")[-300:]
            raise NoCertificate(f"openssl made no certificate: {error} {said}") from error
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # no connection is resumed
        context.load_cert_chain(certificate, key)
        with open(certificate, encoding="ascii") as file:
            return context, digest_of(ssl.PEM_cert_to_DER_cert(file.read()))


def watch_peer(connection: socket.socket, keepalive_s: int) -> None:
    """Make the kernel close the connection when the peer vanishes, after four times `keepalive_s`. Raises OSError."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", keepalive_s), ("TCP_KEEPINTVL", keepalive_s), ("TCP_KEEPCNT", 3)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def digest_of(certificate: bytes) -> bytes:
    """The digest by which both proofs name a certificate in DER."""
    return hashlib.sha256(certificate).digest()


def any_certificate() -> ssl.SSLContext:
    """The context of a gateway. It accepts every certificate, because the proof of the handshake decides."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
