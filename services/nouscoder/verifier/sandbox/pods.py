"""Runners as pods that this gateway makes, through the Kubernetes API, in its own namespace.

INVARIANT: every pod made here is owned by the gateway's own pod (where it is one), so that none outlives it, and
carries the gateway's name as a label, so that gateways never take each other's.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from nouscoder.verifier.sandbox.base import SandboxUnavailable
from nouscoder.verifier.sandbox.pool import Found, RunnersUnreachable

_POOL_LABEL, _QUARANTINE_LABEL = "nouscoder.io/pool", "nouscoder.io/quarantined"
_TIMEOUTS_S = (3.0, 10.0)  # to connect, to answer
_MAX_QUARANTINED = 3

Answer = TypeVar("Answer")


class ManagedPods:
    """See `Source`. POD_NAME, POD_UID and POD_NAMESPACE tell a gateway in a pod who it is."""

    def __init__(self, template: Path, port: int) -> None:
        """Raises SandboxUnavailable when there is no cluster to speak to, or no usable template."""
        self._port = port
        self._template = _read_template(template)
        self._namespace = os.environ.get("POD_NAMESPACE") or self._template["metadata"].get("namespace") or "default"
        self._name = os.environ.get("POD_NAME") or f"gateway-{socket.gethostname()}-{os.getpid()}"[:63]
        self._label = f"{_POOL_LABEL}={self._name}"
        self._api = _open_api()

    async def list(self) -> Sequence[Found]:
        """See `Source`; pods that have ended are removed."""
        selector = f"{self._label},!{_QUARANTINE_LABEL}"
        pods = await self._call(lambda: self._api.list_namespaced_pod(**self._at(), label_selector=selector))
        found = []
        for pod in pods.items:
            if pod.metadata.deletion_timestamp is not None:
                continue
            one = Found(pod.metadata.name, (pod.status.pod_ip, self._port) if _is_ready(pod) else None)
            if pod.status.phase in ("Failed", "Succeeded"):
                await self.remove(one)
            else:
                found.append(one)
        return found

    async def create(self) -> str | None:
        """See `Source`."""
        body = copy.deepcopy(self._template)
        metadata = body["metadata"]
        metadata["namespace"] = self._namespace
        metadata.setdefault("labels", {})[_POOL_LABEL] = self._name
        if uid := os.environ.get("POD_UID"):
            owner = {"apiVersion": "v1", "kind": "Pod", "name": self._name, "uid": uid, "blockOwnerDeletion": False}
            metadata["ownerReferences"] = [owner]
        made = await self._call(lambda: self._api.create_namespaced_pod(**self._at(), body=body))
        return str(made.metadata.name)

    async def remove(self, runner: Found) -> None:
        """See `Source`: at once, for nothing in it is worth a farewell."""
        await self._call(
            lambda: self._api.delete_namespaced_pod(name=runner.name, **self._at(), grace_period_seconds=0)
        )

    async def quarantine(self, runner: Found) -> None:
        """See `Source`; of the quarantined the newest three are kept."""
        patch = {"metadata": {"labels": {_QUARANTINE_LABEL: "true"}}}
        await self._call(lambda: self._api.patch_namespaced_pod(name=runner.name, **self._at(), body=patch))
        selector = f"{self._label},{_QUARANTINE_LABEL}"
        pods = await self._call(lambda: self._api.list_namespaced_pod(**self._at(), label_selector=selector))
        by_age = sorted(pods.items, key=lambda pod: pod.metadata.creation_timestamp)
        for pod in by_age[:-_MAX_QUARANTINED]:
            await self.remove(Found(pod.metadata.name, None))

    async def close(self) -> None:
        """See `Source`."""
        await self._call(
            lambda: self._api.delete_collection_namespaced_pod(
                **self._at(), label_selector=self._label, grace_period_seconds=0
            )
        )

    def _at(self) -> dict[str, Any]:
        return {"namespace": self._namespace, "_request_timeout": _TIMEOUTS_S}

    async def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return await asyncio.to_thread(call)
        except ApiException as error:
            if error.status == 404:
                return None
            raise RunnersUnreachable(f"the Kubernetes API refuses: {_reason(error)}") from error
        except (HTTPError, OSError) as error:
            raise RunnersUnreachable(f"the Kubernetes API does not answer: {error}"[:300]) from error


def _is_ready(pod: Any) -> bool:
    conditions = pod.status.conditions or ()
    return bool(pod.status.pod_ip) and any(c.type == "Ready" and c.status == "True" for c in conditions)


def _reason(error: ApiException) -> str:
    try:
        return str(json.loads(error.body or "")["message"])[:300]
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"


def _read_template(path: Path) -> dict[str, Any]:
    try:
        template = json.loads(path.read_text(encoding="utf8"))
        if template["kind"] != "Pod" or not template["metadata"]["generateName"]:
            raise ValueError("it is no Pod with a metadata.generateName")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SandboxUnavailable(f"verifier.sandbox.pool_template: {path} cannot be used: {error}") from error
    return dict(template)


def _open_api() -> Any:
    try:
        try:
            config.load_incluster_config()  # type: ignore[no-untyped-call]
        except config.ConfigException:
            config.load_kube_config()  # type: ignore[no-untyped-call]
    except config.ConfigException as error:
        raise SandboxUnavailable(
            "the gvisor sandbox cannot start: no Kubernetes API is known here; run the gateway in a pod with a service"
            " account that may make pods, set KUBECONFIG, or set verifier.sandbox.pool_managed = false"
        ) from error
    return client.CoreV1Api()
