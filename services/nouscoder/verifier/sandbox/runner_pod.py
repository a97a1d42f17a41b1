"""What a gateway keeps of a runner pod: five facts, read from the JSON of the Kubernetes API.

The models of the Kubernetes client take 1.3 ms and 74 KiB a pod. A pool of a thousand reads each pod once a minute, and
about five events of its start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RunnerPod:
    """A runner pod. `ip` is "" until the pod is ready.

    `lacked_memory`: the kernel killed it at its memory limit. An exit code says less: 137 is any SIGKILL.
    """

    name: str
    ip: str = ""
    has_ended: bool = False
    is_leaving: bool = False
    lacked_memory: bool = False


def read_pod(record: Mapping[str, Any]) -> RunnerPod:
    """The pod of a record of the API. Raises ValueError for a record that is no pod."""
    try:
        metadata, status = record["metadata"], record.get("status") or {}
        conditions = status.get("conditions") or ()
        is_ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
        return RunnerPod(
            name=str(metadata["name"]),
            ip=str(status.get("podIP") or "") if is_ready else "",
            has_ended=status.get("phase") in ("Failed", "Succeeded"),
            is_leaving=metadata.get("deletionTimestamp") is not None,
            lacked_memory=any(_is_killed_for_memory(one) for one in status.get("containerStatuses") or ()),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a record that is no pod: {error!r}") from error


def _is_killed_for_memory(container: Mapping[str, Any]) -> bool:
    ended = (container.get("state") or {}).get("terminated") or {}
    return bool(ended.get("reason") == "OOMKilled")


def read_pods(text: bytes) -> tuple[dict[str, RunnerPod], str]:
    """The pods of a list by name, and the version from which to watch. Raises ValueError."""
    answer = json.loads(text)
    try:
        pods = [read_pod(record) for record in answer["items"]]
        return {pod.name: pod for pod in pods}, str(answer["metadata"]["resourceVersion"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"an answer that is no list of pods: {error!r}") from error
