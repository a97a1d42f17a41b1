"""The Lease of a gateway in the runners' namespace: the owner of its runners, so that they end after their gateway.

INVARIANT: every runner is owned by the Lease of the gateway that made it. Kubernetes deletes the runners of a deleted
Lease. A gateway renews its Lease, and deletes any other that it has seen unchanged for the time that this one promises.

An owner must be in the namespace of its dependents, so the gateway's own pod cannot be the owner. Ages are measured
with the clock of the observer only; clocks of different nodes need not agree.
"""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime
from typing import Any

from kubernetes.client.exceptions import ApiException

log = logging.getLogger(__name__)

LEASE_S = 45
RENEW_EVERY_S = 10.0
POOL_LABEL = "nouscoder.io/pool"
_TIMEOUTS_S = (3.0, 10.0)  # to connect, to answer


class GatewayLease:
    """The Lease `name` in `namespace`. All calls block, for seconds at most, and raise what the client raises."""

    def __init__(self, api: Any, namespace: str, name: str) -> None:
        """`api` is a CoordinationV1Api."""
        self._api = api
        self._name = name
        self._at = {"namespace": namespace, "_request_timeout": _TIMEOUTS_S}
        self._uid = ""
        self._seen: dict[str, tuple[str, float]] = {}  # other Leases: resource version, when it was first seen

    def owner(self) -> dict[str, Any]:
        """The owner reference of a runner. The first call makes the Lease, or takes over that of a killed process."""
        if not self._uid:
            self._claim()
        reference = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "name": self._name, "uid": self._uid}
        # `kubectl drain` evicts only pods that have a controller.
        return reference | {"controller": True, "blockOwnerDeletion": False}

    def renew(self) -> None:
        """Renew the Lease. Makes it again if it is gone: then the runners that it owned are gone too."""
        body = {"spec": {"renewTime": _now(), "leaseDurationSeconds": LEASE_S}}
        try:
            renewed = self._api.patch_namespaced_lease(name=self._name, body=body, **self._at)
        except ApiException as error:
            if error.status != 404:
                raise
            self._claim()
        else:
            self._uid = renewed.metadata.uid

    def sweep(self) -> list[str]:
        """Delete the Leases of gateways that no longer renew them. Returns their names."""
        now = time.monotonic()
        leases = self._api.list_namespaced_lease(label_selector=POOL_LABEL, **self._at).items
        others = {one.metadata.name: one for one in leases if one.metadata.name != self._name}
        self._seen = {name: seen for name, seen in self._seen.items() if name in others}
        swept = []
        for name, lease in others.items():
            version, since_s = self._seen.get(name, ("", now))
            if version != lease.metadata.resource_version:
                self._seen[name] = (lease.metadata.resource_version, now)
            elif now - since_s > (lease.spec.lease_duration_seconds or LEASE_S):
                self._delete(name)
                swept.append(name)
        for name in swept:
            log.warning("the runners of a gateway that is gone are removed", extra={"gateway": name})
        return swept

    def end(self) -> None:
        """Delete the Lease, and thereby the runners that are left."""
        self._delete(self._name)

    def _claim(self) -> None:
        metadata = {"name": self._name, "labels": {POOL_LABEL: self._name}}
        spec = {"holderIdentity": self._name, "renewTime": _now(), "leaseDurationSeconds": LEASE_S}
        try:
            lease = self._api.create_namespaced_lease(body={"metadata": metadata, "spec": spec}, **self._at)
        except ApiException as error:
            if error.status != 409:
                raise
            lease = self._api.read_namespaced_lease(name=self._name, **self._at)
        self._uid = lease.metadata.uid

    def _delete(self, name: str) -> None:
        try:
            self._api.delete_namespaced_lease(name=name, propagation_policy="Background", **self._at)
        except ApiException as error:
            if error.status != 404:
                raise


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
