"""Asks a cluster about an install with the Kubernetes client. Every write is a dry run of the server."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic import DynamicClient

from nouscoder.doctor.cluster.client import REQUEST_LIMIT_S, KubernetesCluster, api_errors
from nouscoder.doctor.cluster.facts import ClusterError
from nouscoder.doctor.cluster.target import Document, DryRun, Kind, Outcome

# A webhook may take up to 30 s; the server ends its request then.
_DRY_RUN_LIMIT_S = 40.0
_FIELD_MANAGER = "nouscoder-doctor"
_DISCOVERY = ",".join(
    f"application/json;g=apidiscovery.k8s.io;v={version};as=APIGroupDiscoveryList" for version in ("v2", "v2beta1")
)
_NO_RIGHT = re.compile(r'User "[^"]*" cannot \w+ resource')
_UNDECIDED = re.compile(r"does not support dry run|failed calling webhook|failed to call webhook")
# RFC 7234: 299 - "text"
_WARNING = re.compile(r'299 \S+ "((?:[^"\\]|\\.)*)"')


class KubernetesTarget(KubernetesCluster):
    """A `Target`."""

    def __init__(self, api: Any) -> None:
        super().__init__(api)
        # Discovery of its own would write a file; here each path is known.
        self._client: Any = DynamicClient(api, discoverer=lambda client, cache: None)  # type: ignore[no-untyped-call]

    def kinds(self) -> Mapping[str, Kind]:
        """See Target."""
        found: dict[str, Kind] = {}
        for path in ("/api", "/apis"):
            with api_errors("list the kinds of the API"):
                answer = self._get(path, header_params={"Accept": _DISCOVERY})
            for group in answer.get("items", ()):
                found |= _kinds_of(group)
        if not found:
            raise ClusterError("cannot list the kinds of the API: the server does not list them together")
        return found

    def has_namespace(self, name: str) -> bool:
        """See Target."""
        return self._read(f"/api/v1/namespaces/{name}", "read namespaces") is not None

    def read(self, plural: str, namespace: str, name: str) -> Document | None:
        """See Target."""
        return self._read(f"/api/v1/namespaces/{namespace}/{plural}/{name}", f"read {plural} in {namespace}")

    def quotas(self, namespace: str) -> list[Document]:
        """See Target."""
        answer = self._read(f"/api/v1/namespaces/{namespace}/resourcequotas", f"list resourcequotas in {namespace}")
        return list((answer or {}).get("items", ()))

    def dry_run(self, document: Document, kind: Kind, namespace: str) -> DryRun:
        """See Target."""
        body = copy.deepcopy(dict(document))
        version, metadata = str(body["apiVersion"]), body["metadata"]
        path = f"/{'apis' if '/' in version else 'api'}/{version}"
        if kind.namespaced:
            path += f"/namespaces/{namespace}"
            metadata["namespace"] = namespace
        options: dict[str, Any] = {"dry_run": "All", "field_manager": _FIELD_MANAGER}
        if body["kind"] == "Pod":
            metadata["generateName"] = f"{metadata.pop('name', 'pod')[:50]}-"
            verb, path = "post", f"{path}/{kind.plural}"
        else:
            verb, path = "patch", f"{path}/{kind.plural}/{metadata['name']}"
            options |= {"content_type": "application/apply-patch+yaml", "force_conflicts": True}
        try:
            with api_errors("make a dry run", keep=(400, 403, 404, 409, 413, 422, 500, 503)):
                answer = self._client.request(
                    verb, path, body=body, serialize=False, _request_timeout=_DRY_RUN_LIMIT_S, **options
                )
                warnings = tuple(
                    re.sub(r"\\(.)", r"\1", one) for one in _WARNING.findall(answer.headers.get("Warning", ""))
                )
                return DryRun(Outcome.ADMITTED, "", warnings, answer.status == 200, json.loads(answer.data))
        except ApiException as error:
            return _refusal(error)

    def _read(self, path: str, what: str) -> Document | None:
        try:
            with api_errors(what, keep=(404,)):
                return self._get(path)
        except ApiException:
            return None

    def _get(self, path: str, **options: Any) -> dict[str, Any]:
        answer = self._client.request("get", path, serialize=False, _request_timeout=REQUEST_LIMIT_S, **options)
        return dict(json.loads(answer.data))


def _kinds_of(group: Mapping[str, Any]) -> dict[str, Kind]:
    name = group.get("metadata", {}).get("name", "")
    found = {}
    for version in group.get("versions", ()):
        start = f"{name}/{version['version']}" if name else version["version"]
        for resource in version.get("resources", ()):
            kind = resource.get("responseKind", {}).get("kind")
            if kind:
                found[f"{start}/{kind}"] = Kind(resource["resource"], resource.get("scope") == "Namespaced")
    return found


def _refusal(error: ApiException) -> DryRun:
    try:
        message = str(json.loads(error.body or "{}").get("message") or error.reason)
    except ValueError:
        message = str(error.reason)
    if error.status == 403 and _NO_RIGHT.search(message):
        return DryRun(Outcome.MAY_NOT, message)
    undecided = _UNDECIDED.search(message) or error.status in (500, 503)
    return DryRun(Outcome.UNDECIDED if undecided else Outcome.REFUSED, message)
