"""The TLS of a runner: a certificate of its own for each start, which no authority signs.

The greeting replaces the authority: both proofs cover the certificate's digest (`greeting.py`), so a peer between
gateway and runner, which has another certificate, cannot pass them on. TLS 1.3 only, whose keys no later loss of the
pool's key reveals. The private key is on no disk: /tmp of a runner is memory, and the files are removed at once.
"""

from __future__ import annotations

import hashlib
import os
import ssl
import subprocess
import tempfile

_KINDS = ("ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
_LIMIT_S = 30.0


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


def digest_of(certificate: bytes) -> bytes:
    """The digest by which both proofs name a certificate in DER."""
    return hashlib.sha256(certificate).digest()


def any_certificate() -> ssl.SSLContext:
    """The context of a gateway. It accepts every certificate, because the proof of the greeting decides."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
