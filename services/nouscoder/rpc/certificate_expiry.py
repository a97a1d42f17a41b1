"""When the certificates of a service expire, for Prometheus. Files are read at each scrape: they are renewed.

The fields are those of RFC 5280, section 4.1; Python's ssl module decodes a certificate only in a connection.
"""

from __future__ import annotations

import logging
import ssl
from calendar import timegm
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import strptime

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

_END = "-----END CERTIFICATE-----"
_VERSION, _UTC_TIME, _GENERALIZED_TIME = 0xA0, 0x17, 0x18


class ExpiryCollector(Collector):
    """`nouscoder_certificate_expiry_timestamp_seconds` of each file that can be read; registers itself."""

    def __init__(self, registry: CollectorRegistry, files: Sequence[str]) -> None:
        self._files = tuple(dict.fromkeys(name for name in files if name))
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """A sample a file."""
        family = GaugeMetricFamily(
            "nouscoder_certificate_expiry_timestamp_seconds",
            "Unix time after which the first certificate of the file is not valid",
            labels=["file"],
        )
        for name in self._files:
            try:
                family.add_metric([name], expiry_of(Path(name).read_text("ascii")))
            except (OSError, ValueError) as error:
                log.warning("the expiry of a certificate is unknown", extra={"file": name, "reason": str(error)})
        yield family


def expiry_of(pem: str) -> float:
    """Unix time after which the first certificate of a PEM file is not valid. Raises ValueError."""
    begin = pem.find("-----BEGIN CERTIFICATE-----")
    end = pem.find(_END, begin)
    if begin < 0 or end < 0:
        raise ValueError("it holds no certificate")
    try:
        certificate = _items(ssl.PEM_cert_to_DER_cert(pem[begin : end + len(_END)]))
        fields = [item for item in _items(_items(certificate[0][1])[0][1]) if item[0] != _VERSION]
        _serial, _signature, _issuer, (_, validity) = fields[:4]
        kind, text = _items(validity)[1]
        return timegm(strptime(_with_century(kind, text.decode("ascii")), "%Y%m%d%H%M%SZ"))
    except (IndexError, ValueError) as error:
        raise ValueError("its certificate cannot be decoded") from error


def _with_century(kind: int, text: str) -> str:
    """The time with a year of four digits."""
    if kind == _UTC_TIME:
        return ("19" if text[:2] >= "50" else "20") + text
    if kind == _GENERALIZED_TIME:
        return text
    raise ValueError(f"{kind} is no kind of time")


def _items(data: bytes) -> list[tuple[int, bytes]]:
    """Tag and content of each element of a DER sequence. Raises IndexError where it is cut off."""
    found, at = [], 0
    while at < len(data):
        tag, length, at = data[at], data[at + 1], at + 2
        if length & 0x80:
            num_bytes = length & 0x7F
            length, at = int.from_bytes(data[at : at + num_bytes], "big"), at + num_bytes
        if at + length > len(data):
            raise IndexError("cut off")
        found.append((tag, data[at : at + length]))
        at += length
    return found
