"""TLS of the grading API over gRPC, with the configuration section that its HTTP API has too."""

from __future__ import annotations

from pathlib import Path

import grpc

from nouscoder.config import TlsSection
from nouscoder.http_server.tls import http_context


def grpc_credentials(section: TlsSection) -> grpc.ServerCredentials | None:
    """The credentials of the gRPC API; None when TLS is off. Raises TlsUnusable."""
    if http_context(section) is None:  # this also checks the files more strictly than gRPC does
        return None
    pair = (Path(section.key).read_bytes(), Path(section.certificate).read_bytes())
    authority = Path(section.client_ca).read_bytes() if section.client_ca else None
    return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)
