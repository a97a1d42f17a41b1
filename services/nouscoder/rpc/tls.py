"""Mutual TLS between the services of a run, from the files of one section of the configuration.

Only this module makes credentials of servers and channels. Both are None when the section is empty. Renewed files
count from the next connection on, without a restart.

`Renewed` is what is made from files that are renewed while a service runs: certificates, keys, authorities. INVARIANT:
`current` never fails. While new files are incomplete, unreadable or do not belong together, the value of the last
usable ones stays.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import grpc

from nouscoder.config import MutualTlsSection
from nouscoder.errors import Unusable

log = logging.getLogger(__name__)

Made = TypeVar("Made")
Stamp = tuple[tuple[int, int, int], ...] | None


class Renewed(Generic[Made]):
    """A value and the files that it was made from."""

    def __init__(self, files: Sequence[str], make: Callable[[], Made]) -> None:
        """Raises what `make` raises."""
        self._files = [file for file in files if file]
        self._make = make
        self._stamp = self._seen()
        self._value = make()

    def current(self) -> Made:
        """The value of the newest usable files. Any thread may call it; it costs a stat of each file."""
        stamp = self._seen()
        if stamp is None or stamp == self._stamp:
            return self._value
        try:
            value = self._make()
        except Exception as error:
            log.error("renewed files cannot be used: the old ones stay", extra={"detail": str(error)})
            self._stamp = stamp
            return self._value
        if self._seen() == stamp:  # otherwise they were replaced meanwhile: the next call reads them again
            self._stamp, self._value = stamp, value
            log.info("renewed files are in use", extra={"files": ", ".join(self._files)})
        return self._value

    def _seen(self) -> Stamp:
        """What changes when a file is written or replaced; None when one is missing."""
        try:
            seen = [os.stat(file) for file in self._files]
        except OSError:
            return None
        return tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in seen)


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


# For a client, which checks the server's certificate and sends its own. The same object while the files do not change.
ChannelTls = Renewed[grpc.ChannelCredentials]


def channel_credentials(section: MutualTlsSection) -> ChannelTls | None:
    """None without TLS. Raises CertificatesUnusable."""
    if not section.certificate:
        return None

    def credentials() -> grpc.ChannelCredentials:
        certificate, key, authority = _files(section)
        return grpc.ssl_channel_credentials(authority, key, certificate)

    return Renewed(_names(section), credentials)


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
