"""Certificates for tests of TLS."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path, names: str = "IP:127.0.0.1") -> Path:
    """Write tls.crt and tls.key for the names, and ca.crt of their authority. Skips the test without openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing: install it to make the certificates of this test")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    new_key = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(*new_key, "-x509", "-days", "2", "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=authority")
    openssl(*new_key, "-keyout", "tls.key", "-out", "tls.csr", "-subj", "/CN=broker")
    (folder / "names").write_text(f"subjectAltName={names}\n")
    sign = ("x509", "-req", "-days", "2", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial")
    openssl(*sign, "-in", "tls.csr", "-out", "tls.crt", "-extfile", "names")
    return folder
