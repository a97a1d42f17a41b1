"""Mutual TLS between the services of a run, from the files of one section of the configuration.

Only this module makes credentials of servers and channels. Both are None when the section is empty.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from nouscoder.config import MutualTlsSection
from nouscoder.errors import Unusable


class CertificatesUnusable(Unusable):
    """The files of [tls] cannot be used; the message names them."""


def server_credentials(section: MutualTlsSection) -> grpc.ServerCredentials | None:
    """For a server, which requires client certificates of the same authority. Raises CertificatesUnusable."""
    if not section.certificate:
        return None
    certificate, key, authority = _files(section)
    return grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)


def channel_credentials(section: MutualTlsSection) -> grpc.ChannelCredentials | None:
    """For a client, which checks the server's certificate and sends its own. Raises CertificatesUnusable."""
    if not section.certificate:
        return None
    certificate, key, authority = _files(section)
    return grpc.ssl_channel_credentials(authority, key, certificate)


def _files(section: MutualTlsSection) -> tuple[bytes, bytes, bytes]:
    """Certificate chain, key and authority. They are checked here, because gRPC reports faults only at a call."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    names = (section.certificate, section.key, section.ca)
    try:
        context.load_cert_chain(section.certificate, section.key)
        context.load_verify_locations(section.ca)
        certificate, key, authority = (Path(name).read_bytes() for name in names)
    except (OSError, ssl.SSLError) as error:
        raise CertificatesUnusable(
            f"[tls] cannot be set up from {', '.join(names)}: {error.strerror or error}"
        ) from error
    return certificate, key, authority
