"""What the doctor asks a cluster: facts, and dry runs of pods. The cluster is that of KUBECONFIG or of this pod."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import urllib3.exceptions
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic import DynamicClient
from kubernetes.utils.quantity import parse_quantity

from nouscoder.errors import ExitCode, NousCoderError

Document = Mapping[str, Any]

REQUEST_LIMIT_S = 10.0
_DRY_RUN_LIMIT_S = 40.0  # the server ends the request of a webhook after 30 s
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
_ENDED = ("Succeeded", "Failed")
_NO_RIGHT = re.compile(r'User "[^"]*" cannot \w+ resource')
_UNDECIDED = re.compile(r"does not support dry run|failed calling webhook|failed to call webhook")


class ClusterError(NousCoderError):
    """The cluster did not answer, or not as expected. The message names the request."""

    exit_code = ExitCode.UNAVAILABLE


class NotAllowed(ClusterError):
    """RBAC does not allow the account this request, so the fact is unknown."""


class PodRefused(ClusterError):
    """Admission or validation refused a pod. The message is that of the API server."""


@dataclass(frozen=True, slots=True)
class StorageClass:
    """One storage class."""

    name: str
    provisioner: str
    is_default: bool


# How much of each resource: thousandths of a core under "cpu", bytes under "memory", and the number of devices such as
# nvidia.com/gpu. A difference has no negative numbers.
Amount = Counter[str]


def lacks(there: Amount, asked: Amount) -> list[str]:
    """The resources of which there is less than asked for."""
    return [name for name, number in asked.items() if number > there[name]]


def shown(amount: Amount) -> str:
    """An amount in words."""
    devices = "".join(f", {amount[name]} {name}" for name in sorted(amount) if "/" in name and amount[name])
    return f"{amount['cpu'] / 1000:.2f} cores, {amount['memory'] / 1024**3:.2f} GiB{devices}"


@dataclass(frozen=True, slots=True)
class Node:
    """One node. `open` is False for nodes that are unschedulable or not ready; `taints` keep pods away."""

    name: str
    allocatable: Amount
    open: bool
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Mapping[str, str], ...] = ()


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


class Cluster:
    """Reads a cluster. Each call takes at most some seconds, changes nothing, and raises NotAllowed or ClusterError.

    Answers are Any, because the client's types declare every field optional.
    """

    def __init__(self, api: Any) -> None:
        self._api = api
        self._core: Any = client.CoreV1Api(api)
        # Sends documents as they are. Discovery of its own would write a file; here the path is known.
        self._raw: Any = DynamicClient(api, discoverer=lambda client, cache: None)  # type: ignore[no-untyped-call]

    def version(self) -> str:
        """The version of the API server, such as v1.34.4."""
        with api_errors("read the version"):
            answer: Any = client.VersionApi(self._api).get_code(_request_timeout=REQUEST_LIMIT_S)
        return str(answer.git_version)

    def runtime_classes(self) -> dict[str, str]:
        """The handler of each RuntimeClass, by its name."""
        with api_errors("list runtimeclasses"):
            answer: Any = client.NodeV1Api(self._api).list_runtime_class(_request_timeout=REQUEST_LIMIT_S)
        return {item.metadata.name: item.handler for item in answer.items}

    def storage_classes(self) -> list[StorageClass]:
        """All storage classes."""
        with api_errors("list storageclasses"):
            answer: Any = client.StorageV1Api(self._api).list_storage_class(_request_timeout=REQUEST_LIMIT_S)
        return [
            StorageClass(
                item.metadata.name,
                item.provisioner,
                (item.metadata.annotations or {}).get(_DEFAULT_CLASS) == "true",
            )
            for item in answer.items
        ]

    def nodes(self) -> list[Node]:
        """All nodes."""
        with api_errors("list nodes"):
            answer = self._core.list_node(_request_timeout=REQUEST_LIMIT_S)
        return [_node(item) for item in answer.items]

    def requested(self, besides: str) -> dict[str, Amount]:
        """The total requests of pods that have not ended, by node, without those of the release `besides`."""
        with api_errors("list pods of all namespaces"):
            answer = self._core.list_pod_for_all_namespaces(_request_timeout=REQUEST_LIMIT_S)
        sums: dict[str, Amount] = {}
        for pod in answer.items:
            own = (pod.metadata.labels or {}).get("app.kubernetes.io/instance") == besides
            if pod.spec.node_name and pod.status.phase not in _ENDED and not own:
                spec = self._api.sanitize_for_serialization(pod.spec)
                sums[pod.spec.node_name] = sums.get(pod.spec.node_name, Amount()) + requests_of(spec)
        return sums

    def dry_run(self, pod: Document, namespace: str) -> Document:
        """The pod as the cluster would store it, by a dry run of the server. Raises PodRefused, too."""
        metadata = {**pod["metadata"], "namespace": namespace}
        metadata["generateName"] = f"{metadata.pop('name', 'pod')[:50]}-"
        options = {"dry_run": "All", "field_manager": "nouscoder-doctor", "_request_timeout": _DRY_RUN_LIMIT_S}
        body, path = {**pod, "metadata": metadata}, f"/api/v1/namespaces/{namespace}/pods"
        try:
            with api_errors("make a dry run", keep=(400, 403, 404, 409, 413, 422, 500, 503)):
                answer = self._raw.request("post", path, body=body, serialize=False, **options)
        except ApiException as error:
            raise _refusal(error) from None
        return dict(json.loads(answer.data))

    def stored(self, document: Document) -> Document | None:
        """The object of this kind and name that is in the cluster."""
        version, kind, meta = document["apiVersion"], document["kind"], document["metadata"]
        path = f"/{'apis' if '/' in version else 'api'}/{version}/namespaces/{meta['namespace']}/{kind.lower()}s"
        try:
            with api_errors(f"read {kind} {meta['name']}", keep=(404,)):
                answer = self._raw.request(
                    "get", f"{path}/{meta['name']}", serialize=False, _request_timeout=REQUEST_LIMIT_S
                )
        except ApiException:
            return None
        return dict(json.loads(answer.data))


def _refusal(error: ApiException) -> ClusterError:
    """PodRefused, NotAllowed, or ClusterError when a webhook did not answer or does not take part in dry runs."""
    try:
        message = str(json.loads(error.body or "{}").get("message") or error.reason)
    except ValueError:
        message = str(error.reason)
    message = " ".join(message.split())[:600]
    if error.status == 403 and _NO_RIGHT.search(message):
        return NotAllowed(message)
    if error.status in (500, 503) or _UNDECIDED.search(message):
        return ClusterError(message)
    return PodRefused(message)


def _node(item: Any) -> Node:
    ready = any(state.type == "Ready" and state.status == "True" for state in item.status.conditions or ())
    taints = tuple(
        {"key": taint.key, "value": taint.value or "", "effect": taint.effect}
        for taint in item.spec.taints or ()
        if taint.effect in ("NoSchedule", "NoExecute")
    )
    is_open = ready and not item.spec.unschedulable
    return Node(item.metadata.name, _amount(item.status.allocatable), is_open, item.metadata.labels or {}, taints)


def requests_of(spec: Document) -> Amount:
    """What the scheduler counts: the sum of all containers, or the largest init container if higher, and overhead."""
    together = sum((_requests(container) for container in spec["containers"]), Amount())
    for container in spec.get("initContainers") or ():
        together |= _requests(container)
    return together + _amount(spec.get("overhead") or {})


def _requests(container: Document) -> Amount:
    return _amount((container.get("resources") or {}).get("requests") or {})


def _amount(quantities: Mapping[str, Any]) -> Amount:
    """An amount from Kubernetes' quantities by resource; devices have a domain in their names."""
    units = {"cpu": 1000, "memory": 1, **{name: 1 for name in quantities if "/" in name}}
    return Amount(
        {name: ceil(unit * parse_quantity(str(quantities.get(name, 0)))) for name, unit in units.items()}  # type: ignore[no-untyped-call]
    )
