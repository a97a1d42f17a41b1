"""Runners from a pool of agent-sandbox (kubernetes-sigs): a SandboxClaim for each, in the template's namespace.

The cluster's operator has the pool, a SandboxWarmPool, whose sandboxes run already. Its controller gives a sandbox to
each SandboxClaim and makes another for the pool. This gateway makes, watches and deletes claims, and makes no pod.

INVARIANT: a claim stands for one pod. The controller makes another pod for a claim whose pod was deleted. Then the
claim counts as ended and is deleted, so that its runner is replaced like any other that is lost. Claims are owned by
the gateway's Lease, as pods are (`kubernetes_pods.py`). Kubernetes deletes the sandbox and the pod of a deleted claim.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from nouscoder.verifier.sandbox.runners.kubernetes_pods import ManagedPods, RunnerPod, read_pod
from nouscoder.verifier.sandbox.runners.pool import RunnersUnreachable

API = {"group": "extensions.agents.x-k8s.io", "version": "v1beta1", "plural": "sandboxclaims"}
_MERGE = "application/merge-patch+json"
_NO_STATUS = "the controller of agent-sandbox has not seen its SandboxClaim: it must run with --extensions"


def read_claim(record: Mapping[str, Any]) -> tuple[RunnerPod, str, str]:
    """The runner of a SandboxClaim, the address of its pod and the name of its sandbox, which is that of the pod.

    The address is "" while there is no pod; that of the runner, while the pod is not ready. Raises ValueError for a
    record that is no claim.
    """
    try:
        metadata, status = record["metadata"], record.get("status") or {}
        conditions = {one["type"]: one for one in status.get("conditions") or ()}
        sandbox, ready = status.get("sandbox") or {}, conditions.get("Ready") or {}
        address = str((sandbox.get("podIPs") or [""])[0])
        is_ready = ready.get("status") == "True"
        said = f"{ready.get('reason')}: {ready.get('message')}" if ready else _NO_STATUS
        runner = RunnerPod(
            name=str(metadata["name"]),
            ip=address if is_ready else "",
            has_ended="Finished" in conditions,
            is_leaving=metadata.get("deletionTimestamp") is not None,
            waits_for="" if is_ready else said,
        )
        return runner, address, str(sandbox.get("name") or "")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a record that is no pod or claim: {error!r}") from error


class ClaimedSandboxes(ManagedPods):
    """See `Source`. The template is a SandboxClaim, which names the SandboxWarmPool."""

    def _open_calls(self) -> None:
        claims: Any = client.CustomObjectsApi(self._api.api_client)
        self._read = self._read_claim
        self._list_objects = partial(self._list_claims, claims.list_namespaced_custom_object)
        self._create_object = partial(claims.create_namespaced_custom_object, **API)
        self._delete_object = partial(claims.delete_namespaced_custom_object, **API)
        self._patch_object = partial(claims.patch_namespaced_custom_object, **API, _content_type=_MERGE)

    def _list_claims(self, call: Callable[..., Any], **options: Any) -> Any:
        try:
            return call(**API, **options)
        except ApiException as error:
            if error.status != 404:
                raise
            kind = f"{API['plural']}.{API['group']}/{API['version']}"
            raise RunnersUnreachable(f"the cluster has no {kind}: install agent-sandbox with its extensions") from error

    def _read_claim(self, record: Mapping[str, Any]) -> RunnerPod:
        """Blocks for the time of a request if the pod of the claim has ended."""
        runner, address, sandbox = read_claim(record)
        if runner.has_ended:
            return replace(runner, lacked_memory=self._lacked_memory(sandbox))
        if (before := self._pods.get(runner.name)) is not None and before.ip:
            return replace(runner, ip=before.ip, has_ended=address != before.ip, waits_for="")
        return runner

    def _lacked_memory(self, pod: str) -> bool:
        with suppress(ApiException, HTTPError, OSError, ValueError):  # then nothing says so
            return read_pod(json.loads(self._api.read_namespaced_pod(pod, **self._raw()).data)).lacked_memory
        return False

    def _end_objects(self) -> None:
        """See `ManagedPods`. The claims end with their Lease, which makes the right to delete all of them needless."""
