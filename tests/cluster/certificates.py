"""Certificates of one authority for the services of a release, as files and as the content of a Secret."""

from __future__ import annotations

import secrets
import socket
import ssl
import subprocess
from pathlib import Path


def make_certificate(folder: Path, *names: str) -> list[str]:
    """Options of `kubectl create secret` with a new certificate for `names` (such as DNS:HOST), and its authority.

    The authority is made with the first certificate of a folder, and kept.
    """

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)

    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    if not (folder / "ca.crt").exists():
        openssl(*new, "-x509", "-days", "2", "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=authority")
    (folder / "names").write_text(f"subjectAltName={','.join(names)}")
    openssl(*new, "-keyout", "tls.key", "-out", "new.csr", "-subj", f"/CN={secrets.token_hex(4)}")
    signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
    openssl("x509", "-req", "-days", "2", "-in", "new.csr", *signed, "-out", "tls.crt")
    return [f"--from-file={folder / name}" for name in ("tls.crt", "tls.key", "ca.crt")]


def serial(folder: Path) -> str:
    """The serial number of the newest certificate of a folder."""
    words = ["openssl", "x509", "-in", str(folder / "tls.crt"), "-noout", "-serial"]
    said = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout
    return said.strip().removeprefix("serial=")


def trusting(folder: Path) -> ssl.SSLContext:
    """For clients that trust the authority of a folder and show the newest certificate of it."""
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return context


def served_serial(port: int, context: ssl.SSLContext, protocol: str) -> str:
    """The serial number of the certificate that a port of this machine shows to a new connection."""
    context.set_alpn_protocols([protocol])
    with (
        socket.create_connection(("127.0.0.1", port), 30) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        shown = connection.getpeercert()
    assert shown is not None
    return str(shown["serialNumber"])
