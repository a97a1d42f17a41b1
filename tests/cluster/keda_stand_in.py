"""What KEDA does with a ScaledObject, for a cluster without it: the queries, thresholds and pauses are the object's.

It asks the real Prometheus, and sets the replicas by `kubectl scale`. Of KEDA's rules it has those that the chart uses:
a trigger above its activation threshold keeps one pod, the targets decide above one, and the last pod goes
`cooldownPeriod` seconds after the last activity. It has no fallback: a failed query changes nothing.
"""

from __future__ import annotations

import json
import math
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

EVERY_S = 3.0


class KedaStandIn(threading.Thread):
    """Scales until `stop`. `history` has (time, pods) of each change."""

    def __init__(self, spec: dict[str, Any], scale: Callable[[int], object], replicas: int) -> None:
        super().__init__(daemon=True)
        self._spec = spec
        self._scale = scale
        self._stopped = threading.Event()
        self._active_s = time.monotonic() - spec["cooldownPeriod"]
        self._less_since_s: float | None = None
        self.replicas = replicas
        self.history: list[tuple[float, int]] = [(time.monotonic(), replicas)]

    def run(self) -> None:
        """See the class."""
        while not self._stopped.wait(EVERY_S):
            try:
                values = [(one, _value(one["metadata"])) for one in self._spec["triggers"]]
            except (OSError, ValueError):
                continue
            self._follow(self._wanted(values), time.monotonic())

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self.join(60)

    def _wanted(self, values: list[tuple[dict[str, Any], float]]) -> int:
        now_s = time.monotonic()
        if any(value > float(one["metadata"]["activationThreshold"]) for one, value in values):
            self._active_s = now_s
        elif now_s - self._active_s >= self._spec["cooldownPeriod"]:
            return int(self._spec["minReplicaCount"])
        wanted = 1
        for one, value in values:
            share = value / float(one["metadata"]["threshold"])
            wanted = max(wanted, math.ceil(share if one["metricType"] == "AverageValue" else share * self.replicas))
        return min(wanted, int(self._spec["maxReplicaCount"]))

    def _follow(self, wanted: int, now_s: float) -> None:
        """Pods are added at once, and taken away when less were wanted for the whole stabilization window."""
        down = self._spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        if wanted >= self.replicas:
            self._less_since_s = None
        elif self._less_since_s is None:
            self._less_since_s = now_s
        window_s = 0 if wanted == 0 else down["stabilizationWindowSeconds"]
        is_less = self._less_since_s is not None and now_s - self._less_since_s >= window_s
        if wanted > self.replicas or (wanted < self.replicas and is_less):
            self._scale(wanted)
            self.replicas = wanted
            self.history.append((now_s, wanted))


def _value(metadata: dict[str, str]) -> float:
    """The value of a trigger's query. Raises ValueError where no series is a failure, and OSError."""
    query = urllib.parse.urlencode({"query": metadata["query"]})
    with urllib.request.urlopen(f"{metadata['serverAddress']}/api/v1/query?{query}", timeout=10) as answer:
        result = json.load(answer)["data"]["result"]
    if not result and metadata["ignoreNullValues"] == "false":
        raise ValueError("no series")
    return float(result[0]["value"][1]) if result else 0.0
