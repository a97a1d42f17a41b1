"""The TLS context of an HTTP API from the files of its configuration."""

from __future__ import annotations

import ssl

from nouscoder.config import TlsSection
from nouscoder.errors import Unusable


class TlsUnusable(Unusable):
    """The certificate files cannot be used. The message names them."""


def http_context(section: TlsSection) -> ssl.SSLContext | None:
    """The TLS context of an HTTP API; None when TLS is off. Raises TlsUnusable."""
    if not section.certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(section.certificate, section.key)
        if section.client_ca:
            context.load_verify_locations(section.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(filter(None, (section.certificate, section.key, section.client_ca)))
        raise TlsUnusable(f"TLS cannot be set up from {files}: {error.strerror or error}") from error
    return context
