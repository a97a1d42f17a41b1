"""Mutual TLS between the services of a run, from the files of one section of the configuration.

Only this module makes credentials of servers and channels. Both are None when the section is empty. Renewed files
count from the next connection on, without a restart.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc

from nouscoder.config import MutualTlsSection
from nouscoder.errors import Unusable
from nouscoder.rpc.renewed import Renewed


class CertificatesUnusable(Unusable):
    """The files of [tls] cannot be used; the message names them."""


def server_credentials(section: MutualTlsSection) -> grpc.ServerCredentials | None:
    """For a server, which requires client certificates of the same authority. Raises CertificatesUnusable."""
    if not section.certificate:
        return None

    def configuration() -> grpc.ServerCertificateConfiguration:
        certificate, key, authority = _files(section)
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)

    return following(_names(section), configuration, needs_client=True)


def following(
    files: Sequence[str], make: Callable[[], grpc.ServerCertificateConfiguration], *, needs_client: bool
) -> grpc.ServerCredentials:
    """Credentials of a server, made anew when the files change. gRPC asks for them at each handshake."""
    renewed = Renewed(files, make)
    return grpc.dynamic_ssl_server_credentials(renewed.current(), renewed.current, needs_client)


class ChannelTls:
    """For a client, which checks the server's certificate and sends its own."""

    def __init__(self, section: MutualTlsSection) -> None:
        """Raises CertificatesUnusable."""
        self._renewed = Renewed(_names(section), lambda: _channel_credentials(section))

    def credentials(self) -> grpc.ChannelCredentials:
        """Those of the newest files; the same object while they do not change."""
        return self._renewed.current()


def channel_credentials(section: MutualTlsSection) -> ChannelTls | None:
    """None without TLS. Raises CertificatesUnusable."""
    return ChannelTls(section) if section.certificate else None


def _channel_credentials(section: MutualTlsSection) -> grpc.ChannelCredentials:
    certificate, key, authority = _files(section)
    return grpc.ssl_channel_credentials(authority, key, certificate)


def _names(section: MutualTlsSection) -> tuple[str, str, str]:
    return section.certificate, section.key, section.ca


def _files(section: MutualTlsSection) -> tuple[bytes, bytes, bytes]:
    """Certificate chain, key and authority. They are checked here, because gRPC reports faults only at a call."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    names = _names(section)
    try:
        context.load_cert_chain(section.certificate, section.key)
        context.load_verify_locations(section.ca)
        certificate, key, authority = (Path(name).read_bytes() for name in names)
    except (OSError, ssl.SSLError) as error:
        raise CertificatesUnusable(
            f"[tls] cannot be set up from {', '.join(names)}: {error.strerror or error}"
        ) from error
    return certificate, key, authority
