"""The metric of every service that says what runs: version of the project, of Python, and commit of the image."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from nouscoder import __version__

_REVISION = "NOUSCODER_REVISION"  # set by the images


class BuildCollector(Collector):
    """`nouscoder_build_info`, always 1; registers itself."""

    def __init__(self, registry: CollectorRegistry) -> None:
        revision = os.environ.get(_REVISION, "unknown")
        self._labels = {"version": __version__, "python": platform.python_version(), "revision": revision}
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The one sample."""
        yield InfoMetricFamily("nouscoder_build", "What this process runs", value=self._labels)
