"""The TLS context of an HTTP API from the files of its configuration."""

from __future__ import annotations

import ssl

from nouscoder.config import TlsSection
from nouscoder.errors import Unusable
from nouscoder.rpc.tls import Renewed


class TlsUnusable(Unusable):
    """The certificate files cannot be used. The message names them."""


def http_context(section: TlsSection) -> ssl.SSLContext | None:
    """The TLS context of an HTTP API; None when TLS is off. Renewed files count from the next connection on.

    Raises TlsUnusable.
    """
    if not section.certificate:
        return None
    renewed = Renewed(files_of(section), lambda: checked_context(section))
    first = renewed.current()

    def choose(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, of: ssl.SSLContext) -> None:
        connection.context = renewed.current()

    first.sni_callback = choose  # OpenSSL calls it for each connection, also for one that names no server
    return first


def files_of(section: TlsSection) -> tuple[str, str, str]:
    """The files of certificate and key, and of the clients' authority or ""."""
    return section.certificate, section.key, section.client_ca


def checked_context(section: TlsSection) -> ssl.SSLContext:
    """The context of the files as they are now. Raises TlsUnusable."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(section.certificate, section.key)
        if section.client_ca:
            context.load_verify_locations(section.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(filter(None, files_of(section)))
        raise TlsUnusable(f"TLS cannot be set up from {files}: {error.strerror or error}") from error
    return context
