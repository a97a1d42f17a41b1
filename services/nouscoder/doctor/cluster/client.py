"""What the doctor asks a cluster: facts, and dry runs of pods. The cluster is that of KUBECONFIG or of this pod."""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any
from urllib.parse import quote

import urllib3.exceptions
import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic import DynamicClient
from kubernetes.utils.quantity import parse_quantity

from nouscoder.errors import ExitCode, NousCoderError, one_line

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

    exit_code = ExitCode.UNUSABLE


class NoRelease(ClusterError):
    """The namespace has no such release."""

    exit_code = ExitCode.UNUSABLE


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
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ
    load: Any = config.load_kube_config
    if in_pod and not Path("~/.kube/config").expanduser().exists():
        load = config.load_incluster_config
    try:
        load(client_configuration=settings)
    except (config.ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = one_line(str(error))
        raise ClusterError(f"no cluster is configured: set KUBECONFIG, or run this in a pod ({why})") from None
    settings.retries = 1
    logging.getLogger("urllib3").setLevel("ERROR")  # the error says it
    return client.ApiClient(settings)


def usual_namespace() -> str:
    """That of the current context, else nouscoder."""
    try:
        return config.list_kube_config_contexts()[1]["context"].get("namespace") or "nouscoder"  # type: ignore[no-untyped-call]
    except config.ConfigException:  # in a pod
        return "nouscoder"


@contextmanager
def api_errors(what: str, keep: Collection[int] = ()) -> Iterator[None]:
    """Map the client's errors: 401 and 403 to NotAllowed, others to ClusterError. `what` is such as `list nodes`.

    Of a WebSocket the client tells the status in words.

    Answers with a status in `keep` stay an ApiException.
    """
    try:
        yield
    except ApiException as error:
        if error.status in keep:
            raise
        told = re.match(r"Handshake status (\d+)", str(error.reason))
        status = int(told[1]) if told else error.status
        if status == 401:
            raise NotAllowed(f"cannot {what}: the API server does not take this login (401): log in again") from None
        if status == 403:
            raise NotAllowed(f"this account may not {what}") from None
        raise ClusterError(f"cannot {what}: {status or ''} {one_line(str(error.reason))[:200]}") from None
    except (urllib3.exceptions.HTTPError, OSError) as error:
        name = type(getattr(error, "reason", error)).__name__
        raise ClusterError(f"cannot {what}: the API server does not answer ({name})") from None


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

    def objects(self, path: str, **selector: str) -> list[Document]:
        """All objects of a path such as /api/v1/namespaces/NAMESPACE/pods that the selector takes."""
        place, _, kind = path.rpartition("/")
        namespace = place.partition("/namespaces/")[2]
        what = f"list {kind} in namespace {namespace}" if namespace else f"list {kind}"
        with api_errors(what):
            options = {"serialize": False, "_request_timeout": REQUEST_LIMIT_S, **selector}
            answer = self._raw.request("get", quote(path), **options).data
        try:
            return list(json.loads(answer)["items"])
        except (ValueError, KeyError, TypeError):
            raise ClusterError(f"cannot {what}: what answers is no API server: check the kubeconfig") from None

    def runtime_classes(self) -> dict[str, str]:
        """The handler of each RuntimeClass, by its name."""
        found = self.objects("/apis/node.k8s.io/v1/runtimeclasses")
        return {one["metadata"]["name"]: one["handler"] for one in found}

    def storage_classes(self) -> list[StorageClass]:
        """All storage classes."""
        found = [
            (one["metadata"], one["provisioner"]) for one in self.objects("/apis/storage.k8s.io/v1/storageclasses")
        ]
        is_default = [(data.get("annotations") or {}).get(_DEFAULT_CLASS) == "true" for data, _ in found]
        return [StorageClass(data["name"], by, default) for (data, by), default in zip(found, is_default, strict=True)]

    def nodes(self) -> list[Node]:
        """All nodes."""
        return [_node(one) for one in self.objects("/api/v1/nodes")]

    def requested(self, besides: str) -> dict[str, Amount]:
        """The total requests of pods that have not ended, by node, without those of the release `besides`."""
        sums: dict[str, Amount] = {}
        for pod in self.objects("/api/v1/pods"):
            own = (pod["metadata"].get("labels") or {}).get("app.kubernetes.io/instance") == besides
            if (node := pod["spec"].get("nodeName")) and pod["status"].get("phase") not in _ENDED and not own:
                sums[node] = sums.get(node, Amount()) + requests_of(pod["spec"])
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


def _node(item: Document) -> Node:
    name, spec, status = item["metadata"]["name"], item["spec"], item["status"]
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions") or ())
    taints = tuple(
        {"value": "", **taint} for taint in spec.get("taints") or () if taint["effect"] in ("NoSchedule", "NoExecute")
    )
    is_open = ready and not spec.get("unschedulable")
    return Node(name, _amount(status.get("allocatable") or {}), is_open, item["metadata"].get("labels") or {}, taints)


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
