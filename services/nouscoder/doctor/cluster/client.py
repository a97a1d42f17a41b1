"""Reads a cluster with the Kubernetes client: that of KUBECONFIG, or that of the pod in which this runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import urllib3.exceptions
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.utils.quantity import parse_quantity

from nouscoder.doctor.cluster.facts import Amount, ClusterError, Node, NotAllowed, StorageClass, Taint

# Answers are Any, because the client's types declare every field optional, also those that the API always sets.
REQUEST_LIMIT_S = 10.0
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
_ENDED = ("Succeeded", "Failed")


def connect() -> Any:
    """A client of the cluster. Raises ClusterError when no cluster is configured."""
    settings = client.Configuration()
    try:
        config.load_config(client_configuration=settings)  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError) as error:
        raise ClusterError(f"no cluster is configured: set KUBECONFIG, or run this in a pod ({error})") from None
    settings.retries = 1
    return client.ApiClient(settings)


@contextmanager
def api_errors(what: str, keep: Collection[int] = ()) -> Iterator[None]:
    """Map the client's errors: 401 and 403 to NotAllowed, others to ClusterError. `what` is such as `list nodes`.

    Answers with a status in `keep` stay an ApiException.
    """
    try:
        yield
    except ApiException as error:
        if error.status in keep:
            raise
        if error.status in (401, 403):
            raise NotAllowed(f"this account may not {what}") from None
        raise ClusterError(f"cannot {what}: {error.status} {error.reason}") from None
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise ClusterError(f"cannot {what}: the API server does not answer ({type(error).__name__})") from None


class KubernetesCluster:
    """A `Cluster`."""

    def __init__(self, api: Any) -> None:
        self._api = api

    def version(self) -> str:
        """See Cluster."""
        with api_errors("read the version"):
            answer: Any = client.VersionApi(self._api).get_code(_request_timeout=REQUEST_LIMIT_S)
        return str(answer.git_version)

    def runtime_classes(self) -> dict[str, str]:
        """See Cluster."""
        with api_errors("list runtimeclasses"):
            answer: Any = client.NodeV1Api(self._api).list_runtime_class(_request_timeout=REQUEST_LIMIT_S)
        return {item.metadata.name: item.handler for item in answer.items}

    def storage_classes(self) -> list[StorageClass]:
        """See Cluster."""
        with api_errors("list storageclasses"):
            answer: Any = client.StorageV1Api(self._api).list_storage_class(_request_timeout=REQUEST_LIMIT_S)
        modes = self._modes_in_use()
        return [
            StorageClass(
                item.metadata.name,
                item.provisioner,
                (item.metadata.annotations or {}).get(_DEFAULT_CLASS) == "true",
                frozenset(modes.get(item.metadata.name, ())),
            )
            for item in answer.items
        ]

    def _modes_in_use(self) -> dict[str, set[str]]:
        """Access modes by storage class; empty when the account may not list volumes."""
        modes: dict[str, set[str]] = {}
        try:
            with api_errors("list persistentvolumes"):
                volumes: Any = client.CoreV1Api(self._api).list_persistent_volume(_request_timeout=REQUEST_LIMIT_S)
        except NotAllowed:
            return modes
        for volume in volumes.items:
            modes.setdefault(volume.spec.storage_class_name or "", set()).update(volume.spec.access_modes or ())
        return modes

    def nodes(self) -> list[Node]:
        """See Cluster."""
        with api_errors("list nodes"):
            answer: Any = client.CoreV1Api(self._api).list_node(_request_timeout=REQUEST_LIMIT_S)
        return [_node(item) for item in answer.items]

    def requested(self) -> dict[str, Amount]:
        """See Cluster."""
        with api_errors("list pods of all namespaces"):
            answer: Any = client.CoreV1Api(self._api).list_pod_for_all_namespaces(_request_timeout=REQUEST_LIMIT_S)
        sums: dict[str, Amount] = {}
        for pod in answer.items:
            if pod.spec.node_name and pod.status.phase not in _ENDED:
                sums[pod.spec.node_name] = sums.get(pod.spec.node_name, Amount(0, 0)) + _asked_for(pod)
        return sums

    def has_resource(self, name: str) -> bool:
        """See Cluster."""
        group = name.partition(".")[2]
        with api_errors("list API groups"):
            # Every account may list API groups, but often not CustomResourceDefinitions.
            answer: Any = client.ApisApi(self._api).get_api_versions(_request_timeout=REQUEST_LIMIT_S)
        versions = [found.preferred_version.version for found in answer.groups if found.name == group]
        if not versions:
            return False
        with api_errors(f"list resources of {group}"):
            resources: Any = client.CustomObjectsApi(self._api).get_api_resources(
                group, versions[0], _request_timeout=REQUEST_LIMIT_S
            )
        return any(resource.name == name.partition(".")[0] for resource in resources.resources)


def _node(item: Any) -> Node:
    ready = any(state.type == "Ready" and state.status == "True" for state in item.status.conditions or ())
    taints = tuple(
        Taint(taint.key, taint.value or "", taint.effect)
        for taint in item.spec.taints or ()
        if taint.effect in ("NoSchedule", "NoExecute")
    )
    is_open = ready and not item.spec.unschedulable
    return Node(item.metadata.name, amount(item.status.allocatable), is_open, item.metadata.labels or {}, taints)


def _asked_for(pod: Any) -> Amount:
    """The request that the scheduler counts: the sum of all containers, or the largest init container if higher."""
    together = sum((_requests(container) for container in pod.spec.containers), Amount(0, 0))
    for container in pod.spec.init_containers or ():
        together = together.at_least(_requests(container))
    return together


def _requests(container: Any) -> Amount:
    return amount((container.resources.requests or {}) if container.resources else {})


def amount(quantities: Mapping[str, str]) -> Amount:
    """An amount from Kubernetes' quantities by resource; extended resources have a domain in their names."""
    cpu, memory = (parse_quantity(quantities.get(name, 0)) for name in ("cpu", "memory"))  # type: ignore[no-untyped-call]
    devices = {name: int(number) for name, number in quantities.items() if "/" in name}
    return Amount(float(cpu), int(memory), devices)
