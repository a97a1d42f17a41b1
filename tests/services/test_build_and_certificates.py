"""Every service exports what it runs, and when its certificates expire, also after they were renewed."""

from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path
from ssl import cert_time_to_seconds

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from nouscoder import __version__
from nouscoder.rpc.certificate_expiry import ExpiryCollector, expiry_of
from nouscoder.rpc.server import BuildCollector

SERIES = "nouscoder_certificate_expiry_timestamp_seconds"


def openssl(folder: Path, *arguments: str) -> str:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing: install it to make the certificates of this test")
    done = subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout


def make(folder: Path, days: int, key: str = "ec") -> Path:
    kind = ("ec", "-pkeyopt", "ec_paramgen_curve:prime256v1") if key == "ec" else (key,)
    name = ("-keyout", "tls.key", "-out", "tls.crt", "-subj", "/CN=x")
    openssl(folder, "req", "-newkey", *kind, "-nodes", "-x509", "-days", str(days), *name)
    return folder / "tls.crt"


@pytest.mark.parametrize(("days", "key"), [(1, "ec"), (400, "rsa:2048"), (20000, "ec")])
def test_the_expiry_is_that_which_openssl_reads(tmp_path: Path, days: int, key: str) -> None:
    """Years from 2050 on have another form in a certificate."""
    file = make(tmp_path, days, key)
    wanted = openssl(tmp_path, "x509", "-in", "tls.crt", "-noout", "-enddate").strip().removeprefix("notAfter=")
    chain = "a comment\n" + file.read_text() + make(tmp_path, 7).read_text()
    assert expiry_of(chain) == cert_time_to_seconds(wanted)


@given(st.one_of(st.text(), st.binary().map(lambda data: data.decode("latin1"))), st.integers(0, 2**16))
def test_what_is_no_certificate_is_refused(text: str, cut: int) -> None:
    body = base64.b64encode(text.encode()[:cut]).decode()
    for pem in (text, f"-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----\n"):
        with pytest.raises(ValueError, match="certificate"):
            expiry_of(pem)


def test_a_renewed_file_is_read_and_a_missing_one_left_out(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    file = make(tmp_path, 1)
    ExpiryCollector(registry, [str(file), "", str(file), str(tmp_path / "gone.crt")])
    first = registry.get_sample_value(SERIES, {"file": str(file)})
    make(tmp_path, 90)
    second = registry.get_sample_value(SERIES, {"file": str(file)})
    assert first is not None
    assert second is not None
    assert 88 * 86400 < second - first < 90 * 86400
    assert registry.get_sample_value(SERIES, {"file": str(tmp_path / "gone.crt")}) is None


def test_build_info_names_the_version_and_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOUSCODER_REVISION", "abc")
    registry = CollectorRegistry()
    BuildCollector(registry)
    (family,) = registry.collect()
    (sample,) = family.samples
    assert (sample.name, sample.value) == ("nouscoder_build_info", 1)
    assert (sample.labels["version"], sample.labels["revision"]) == (__version__, "abc")
