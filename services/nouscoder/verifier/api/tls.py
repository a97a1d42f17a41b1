"""TLS of the grading API over gRPC, with the configuration section that its HTTP API has too."""

from __future__ import annotations

from pathlib import Path

import grpc

from nouscoder.config import TlsSection
from nouscoder.http_server.tls import checked_context, files_of
from nouscoder.rpc.tls import following


def grpc_credentials(section: TlsSection) -> grpc.ServerCredentials | None:
    """The credentials of the gRPC API; None when TLS is off. Raises TlsUnusable."""
    if not section.certificate:
        return None

    def configuration() -> grpc.ServerCertificateConfiguration:
        checked_context(section)  # this checks the files more strictly than gRPC does
        pair = (Path(section.key).read_bytes(), Path(section.certificate).read_bytes())
        authority = Path(section.client_ca).read_bytes() if section.client_ca else None
        return grpc.ssl_server_certificate_configuration([pair], authority)

    return following(files_of(section), configuration, needs_client=bool(section.client_ca))
