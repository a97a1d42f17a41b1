"""The metrics of several processes as those of one service.

INVARIANT: no counter falls when a process ends or does not answer: what it last said keeps counting. Numbers of things
that the processes have are added. Of ages and of what is the same everywhere the largest is taken, of times the first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from nouscoder.rpc.addresses import unix_address
from nouscoder.rpc.metrics_page import read_metrics

_GROWING = frozenset({"counter", "histogram", "summary"})
_LARGEST = ("_oldest_age_seconds", "_queue_clients", "_build_info", "_limited", "process_max_fds")
_FIRST = ("_created", "_start_time_seconds", "_expiry_timestamp_seconds")

_Key = tuple[str, tuple[tuple[str, str], ...]]  # name and labels of a sample


class SocketMetrics(Collector):
    """The metrics that another process serves on a unix socket; none when it does not answer."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def collect(self) -> Iterator[Metric]:
        """The current values."""
        try:
            text = read_metrics(unix_address(self._path))
        except OSError:
            return
        yield from text_string_to_metric_families(text)


class MergedMetrics(Collector):
    """Merges what `sources` say, one for each process."""

    def __init__(
        self, sources: Mapping[int, Collector], more: Callable[[], Iterator[Metric]] = lambda: iter(())
    ) -> None:
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
