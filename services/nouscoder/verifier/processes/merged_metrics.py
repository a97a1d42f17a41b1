"""The metrics of several processes as those of one service.

INVARIANT: no counter falls when a process ends or does not answer: what it last said keeps counting. Numbers of things
that the processes have are added. Of ages and of what is the same everywhere the largest is taken, of times the first.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_LIMIT_S = 5.0
_GROWING = frozenset({"counter", "histogram", "summary"})
_LARGEST = ("_oldest_age_seconds", "_queue_clients", "_build_info", "_limited", "process_max_fds")
_FIRST = ("_created", "_start_time_seconds", "_expiry_timestamp_seconds")

_Key = tuple[str, tuple[tuple[str, str], ...]]  # name and labels of a sample


class Scraped(Protocol):
    """A registry, or something else with metrics."""

    def collect(self) -> Iterable[Metric]:
        """The current values."""
        ...


class SocketMetrics(Collector):
    """The metrics that another process serves on a unix socket; none when it does not answer."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def collect(self) -> Iterator[Metric]:
        """The current values."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(_LIMIT_S)
                connection.connect(str(self._path))
                text = b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()
        except OSError:
            return
        yield from text_string_to_metric_families(text)


def serve_on_socket(registry: CollectorRegistry, path: Path, stack: AsyncExitStack) -> None:
    """Serve the metrics of `registry` on a unix socket, in a thread, until `stack` closes."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(_LIMIT_S)
            self.request.sendall(generate_latest(registry))

    path.unlink(missing_ok=True)  # of a process with this name that was killed
    server = socketserver.ThreadingUnixStreamServer(str(path), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(timeout=_LIMIT_S)

    stack.callback(close)


class MergedMetrics(Collector):
    """Merges what `sources` say, one for each process."""

    def __init__(self, sources: Mapping[int, Scraped], more: Callable[[], Iterator[Metric]] = lambda: iter(())) -> None:
        """`more` are metrics of the whole service."""
        self._sources = sources
        self._more = more
        self._lock = threading.Lock()
        self._last: dict[int, list[Metric]] = {}
        self._ended: dict[_Key, float] = {}  # growing samples of processes that have ended

    def ended(self, index: int) -> None:
        """Process `index` has ended; another one may take its place."""
        with self._lock:
            for family in self._last.pop(index, []):
                if family.type in _GROWING:
                    for sample in family.samples:
                        if not sample.name.endswith(_FIRST):
                            key = _key(sample.name, sample.labels)
                            self._ended[key] = self._ended.get(key, 0.0) + sample.value

    def collect(self) -> Iterator[Metric]:
        """The current values."""
        with self._lock:
            for index, source in self._sources.items():
                if said := list(source.collect()):
                    self._last[index] = said
            families = [family for said in self._last.values() for family in said]
            merged = _merged(families, self._ended)
        yield from merged
        yield from self._more()


def _merged(families: list[Metric], ended: Mapping[_Key, float]) -> list[Metric]:
    by_name: dict[str, Metric] = {}
    values: dict[str, dict[_Key, float]] = {}
    for family in families:
        by_name.setdefault(family.name, family)
        found = values.setdefault(family.name, {})
        for sample in family.samples:
            key = _key(sample.name, sample.labels)
            found[key] = _of_two(sample.name, found[key], sample.value) if key in found else sample.value
    merged = []
    for name, samples in values.items():
        family = Metric(name, by_name[name].documentation, by_name[name].type, by_name[name].unit)
        for (sample_name, labels), value in samples.items():
            family.add_sample(sample_name, dict(labels), value + ended.get((sample_name, labels), 0.0))
        merged.append(family)
    return merged


def _of_two(name: str, one: float, other: float) -> float:
    if name.endswith(_LARGEST):
        return max(one, other)
    return min(one, other) if name.endswith(_FIRST) else one + other


def _key(name: str, labels: Mapping[str, str]) -> _Key:
    return name, tuple(sorted(labels.items()))
