"""Signed statements: DSSE envelopes, as cosign and in-toto read and write them.

Source: https://github.com/secure-systems-lab/dsse. Keys are PEM files of ECDSA P-256 or Ed25519 (see openssl genpkey).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import FormatError, UnsupportedAlgorithmError, VerificationError
from securesystemslib.signer import CryptoSigner, SSlibKey

_PAYLOAD = "application/vnd.in-toto+json"


class UnusableKey(Exception):
    """The file holds no key that can sign, or check a signature."""


class NotVerified(Exception):
    """The envelope is not one that this key has signed for this image. The message says what differs."""


def sign(statement: dict[str, Any], key: Path) -> dict[str, Any]:
    """The statement in an envelope, signed with the private key in `key`. Raises UnusableKey."""
    try:
        signer = CryptoSigner(load_pem_private_key(key.read_bytes(), password=None))
    except (OSError, ValueError, TypeError, UnsupportedAlgorithmError) as error:
        raise UnusableKey(f"{key} holds no private key without a password: {error}") from error
    envelope = Envelope(json.dumps(statement, sort_keys=True).encode(), _PAYLOAD, {})
    envelope.sign(signer)
    made: dict[str, Any] = envelope.to_dict()
    return made


def verified(envelope: bytes, key: Path, digest: str) -> dict[str, Any]:
    """The statement of an envelope that the public key in `key` has signed for the image `digest`.

    Raises NotVerified and UnusableKey.
    """
    try:
        public = SSlibKey.from_crypto(load_pem_public_key(key.read_bytes()))
    except (OSError, ValueError, TypeError, UnsupportedAlgorithmError) as error:
        raise UnusableKey(f"{key} holds no public key: {error}") from error
    try:
        opened = Envelope.from_dict(json.loads(envelope))
        opened.verify([public], 1)
        statement: dict[str, Any] = json.loads(opened.payload)
        subjects = [f"{kind}:{value}" for each in statement["subject"] for kind, value in each["digest"].items()]
    except VerificationError:
        raise NotVerified(f"the key in {key} has not signed this") from None
    except (ValueError, KeyError, TypeError, AttributeError, FormatError) as error:
        raise NotVerified(f"not a signed statement: {error}") from error
    if opened.payload_type != _PAYLOAD:
        raise NotVerified(f"it is signed as {opened.payload_type!r}, not as a statement")
    if digest not in subjects:
        raise NotVerified(f"it is about {', '.join(subjects)}, not about {digest}")
    return statement
