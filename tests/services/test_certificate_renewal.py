"""Certificates and tokens change while services run, and no process starts again for it.

The services are real processes. As in a Kubernetes volume, the files change together by the exchange of a link.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.certificates import make_certificate

from nouscoder.config import MutualTlsSection, TlsSection, load_config
from nouscoder.domain.submission import StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import VerdictKind
from nouscoder.http_server.listener import http_context
from nouscoder.rpc.channel import PeerError, PeerUnreachable
from nouscoder.rpc.tls import Renewed, channel_credentials
from nouscoder.rpc.verifier_client import VerifierClient, verifier_token

LIMIT_S = 90.0


class Files:
    """A folder `now` with tls.crt, tls.key and ca.crt, which is replaced at once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now, self._number = folder, folder / "now", 0
        self.renew()

    def renew(self) -> None:
        """Another authority, and a certificate of it."""
        self._number += 1
        made = self.folder / str(self._number)
        made.mkdir()
        make_certificate(made)
        link = self.folder / "new"
        link.symlink_to(made)
        os.replace(link, self.now)

    def of(self, number: int) -> Path:
        return self.folder / str(number)

    def tls(self, folder: Path | None = None) -> MutualTlsSection:
        at = folder or self.now
        return MutualTlsSection(certificate=str(at / "tls.crt"), key=str(at / "tls.key"), ca=str(at / "ca.crt"))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def ports() -> tuple[int, int]:
    """Two free ports that Linux gives to no client, because a service that is started again needs the same ones."""
    found: list[int] = []
    while len(found) < 2:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            found.append(port)
    return found[0], found[1]


def started(files: Files, ports: tuple[int, int], **more: str) -> subprocess.Popen[bytes]:
    """A verifier with TLS on both APIs and client certificates, when it listens. `more`: keys of [verifier]."""
    settings = {f"verifier.{name}": value for name, value in more.items()} | {
        "verifier.sandbox.backend": "fake",
        "verifier.tls.certificate": f"{files.now}/tls.crt",
        "verifier.tls.key": f"{files.now}/tls.key",
        "verifier.tls.client_ca": f"{files.now}/ca.crt",
    }
    command = [sys.executable, "-m", "nouscoder", "serve", "verifier", "--http", f"127.0.0.1:{ports[0]}"]
    command += ["--grpc", f"127.0.0.1:{ports[1]}"]
    for name, value in settings.items():
        command += ["--set", f"{name}={json.dumps(value)}"]
    with (files.folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stderr=log, stdout=log)
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", ports[1]), timeout=1).close()
        except OSError:
            assert process.poll() is None, (files.folder / "log").read_text()[-2000:]
            time.sleep(0.05)
        else:
            return process
    process.kill()
    raise AssertionError((files.folder / "log").read_text()[-2000:])


@pytest.fixture
def verifier(files: Files, ports: tuple[int, int]) -> Iterator[subprocess.Popen[bytes]]:
    process = started(files, ports)
    yield process
    process.kill()
    process.wait()


def tls_to(port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    """A connection after the handshake. Raises OSError."""
    return context.wrap_socket(socket.create_connection(("127.0.0.1", port), 60), server_hostname="127.0.0.1")


def trusted(port: int, folder: Path) -> bool:
    """Whether a new HTTPS connection with the files of `folder` is accepted by both sides."""
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    try:
        with tls_to(port, context) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            return connection.recv(15).startswith(b"HTTP/1.1 200")
    except (ssl.SSLError, ConnectionError):
        return False


async def graded(port: int, files: Files, folder: Path | None = None, patience_s: float = 60.0) -> bool:
    """Whether a new gRPC channel is accepted by both sides."""
    try:
        tls = channel_credentials(files.tls(folder))
        async with VerifierClient(f"127.0.0.1:{port}", patience_s, tls) as client:
            assert await accepts(client)
    except PeerUnreachable:
        return False
    return True


SUBMISSION = Submission(StdinTests((StdinCase("a", "a"),)), code="x")


async def accepts(client: VerifierClient) -> bool:
    """Whether the right program, which echoes its input in the fake sandbox, gets its verdict."""
    return (await client.grade(SUBMISSION)).kind is VerdictKind.ACCEPTED


async def test_new_connections_of_both_apis_get_the_renewed_certificate(
    files: Files, ports: tuple[int, int], verifier: subprocess.Popen[bytes]
) -> None:
    """Also the authority of client certificates is renewed: those of the old one are refused."""
    http, grpc = ports
    assert trusted(http, files.of(1))
    assert await graded(grpc, files)
    async with VerifierClient(f"127.0.0.1:{grpc}", 60, channel_credentials(files.tls())) as kept:
        assert await accepts(kept)
        files.renew()
        assert trusted(http, files.of(2))
        assert not trusted(http, files.of(1))
        assert await graded(grpc, files, files.of(2))
        assert not await graded(grpc, files, files.of(1), patience_s=1)
        assert await accepts(kept)  # its connection was not cut
    assert verifier.poll() is None


async def test_a_client_uses_renewed_certificates_when_it_connects_again(
    files: Files, ports: tuple[int, int], verifier: subprocess.Popen[bytes]
) -> None:
    async with VerifierClient(f"127.0.0.1:{ports[1]}", LIMIT_S, channel_credentials(files.tls())) as client:
        assert await accepts(client)
        files.renew()
        verifier.kill()
        verifier.wait()
        again = started(files, ports)
        try:
            assert await accepts(client)
        finally:
            again.kill()
            again.wait()


async def test_unusable_new_files_leave_the_old_ones_in_use(
    files: Files, ports: tuple[int, int], verifier: subprocess.Popen[bytes]
) -> None:
    (files.of(1) / "tls.crt").rename(files.of(1) / "kept")
    assert trusted_by(ports[0], files)
    (files.of(1) / "tls.crt").write_text("-----BEGIN CERTIFICATE-----\n")
    assert trusted_by(ports[0], files)
    assert "the old ones stay" in (files.folder / "log").read_text()
    (files.of(1) / "kept").replace(files.of(1) / "tls.crt")
    assert trusted(ports[0], files.of(1))
    assert await graded(ports[1], files)


def trusted_by(port: int, files: Files) -> bool:
    """Whether the service still shows a certificate of the first authority."""
    context = ssl.create_default_context(cafile=str(files.of(1) / "ca.crt"))
    with tls_to(port, context) as connection:
        return connection.getpeercert() is not None


async def test_a_client_follows_its_token_without_a_refused_call(files: Files, ports: tuple[int, int]) -> None:
    """In the order of docs/operating.md: the new line, the client's token, then the old line goes."""
    tokens, token = files.folder / "tokens", files.folder / "token"
    lines = {secret: f"run:{hashlib.sha256(secret.encode()).hexdigest()}\n" for secret in ("old", "new")}
    tokens.write_text(lines["old"])
    token.write_text("old\n")
    process = started(files, ports, tokens_file=str(tokens))
    config = load_config(None, [f"run.verifier_token_file={json.dumps(str(token))}"])
    address, tls = f"127.0.0.1:{ports[1]}", channel_credentials(files.tls())
    try:
        async with VerifierClient(address, 60, tls, verifier_token(config)) as client:
            assert await accepts(client)
            tokens.write_text(lines["old"] + lines["new"])
            async with VerifierClient(address, 60, tls, lambda: "new") as other:
                await until_accepted(other)
            token.write_text("new\n")
            tokens.write_text(lines["new"])
            async with VerifierClient(address, 60, tls, lambda: "old") as other:
                await until_refused(other)
            assert await accepts(client)
    finally:
        process.kill()
        process.wait()


async def until_accepted(client: VerifierClient) -> None:
    async with asyncio.timeout(LIMIT_S):
        while await refusal(client):
            await asyncio.sleep(0.05)


async def until_refused(client: VerifierClient) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not (said := await refusal(client)):
            await asyncio.sleep(0.05)
    assert "UNAUTHENTICATED" in said


async def refusal(client: VerifierClient) -> str:
    try:
        assert await accepts(client)
    except PeerError as error:
        return str(error)
    return ""


def test_a_value_is_made_again_only_when_a_file_changes(tmp_path: Path) -> None:
    file, made = tmp_path / "a", []
    file.write_text("1")

    def make() -> str:
        made.append(file.read_text())
        if made[-1] == "bad":
            raise ValueError("bad")
        return made[-1]

    renewed = Renewed([str(file), ""], make)
    for text, value in (("1", "1"), ("22", "22"), ("bad", "22"), ("333", "333")):
        other = tmp_path / "b"
        other.write_text(text)
        other.replace(file)
        assert [renewed.current() for _ in range(3)] == [value] * 3
    assert made.count("bad") == 1
    file.unlink()
    assert renewed.current() == "333"


def test_without_a_certificate_there_is_no_tls() -> None:
    assert http_context(TlsSection()) is None
    assert channel_credentials(MutualTlsSection()) is None
