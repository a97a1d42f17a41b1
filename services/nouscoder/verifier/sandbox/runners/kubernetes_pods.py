"""Runners as pods that this gateway makes and watches through the Kubernetes API, in the template's namespace.

`sandbox_claims.py` does the same with claims on the pods of agent-sandbox.

INVARIANT: every pod made here is owned by the gateway's Lease, and Kubernetes deletes the pods of a deleted Lease. A
gateway renews its Lease, and deletes any other that it has seen unchanged for the time that this one promises. Every
pod has the gateway's name as a label, so that a gateway never takes a pod of another. The list of pods comes from a
watch, which starts again with a full list at least every `_RESYNC_S` seconds. A pod that was removed here is never
listed again.

An owner must be in the namespace of its dependents, so the gateway's own pod cannot be the owner. Ages are measured
with the clock of the observer only; clocks of different nodes need not agree.

Of a pod a gateway keeps five facts, read from the JSON of the API: the models of the Kubernetes client take 1.3 ms and
74 KiB a pod. A pool of a thousand reads each pod once a minute, and about five events of its start.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from nouscoder.verifier.sandbox.base import SandboxUnavailable
from nouscoder.verifier.sandbox.runners.pool import FoundRunner, RunnersUnreachable

LEASE_S = 45
RENEW_EVERY_S = 10.0
POOL_LABEL = "nouscoder.io/pool"
log = logging.getLogger(__name__)
_QUARANTINE_LABEL = "nouscoder.io/quarantined"
_TIMEOUTS_S = (3.0, 10.0)  # to connect, to answer
_RESYNC_S = 60
_RETRY_S = 1.0
_STOP_LIMIT_S = 5.0
_MAX_QUARANTINED = 3
_NEWS_LIMIT_S = 5.0  # of the end of a pod, after that of its connection
_MAX_OUT_OF_MEMORY = 1000  # names that are remembered
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class RunnerPod:
    """A runner pod. `ip` is "" until the pod is ready.

    `lacked_memory`: the kernel killed it at its memory limit. An exit code says less: 137 is any SIGKILL.
    `waits_for` is what keeps it from being ready, if that is known.
    """

    name: str
    ip: str = ""
    has_ended: bool = False
    is_leaving: bool = False
    lacked_memory: bool = False
    waits_for: str = ""


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


def read_pods(
    text: bytes, read: Callable[[Mapping[str, Any]], RunnerPod] = read_pod
) -> tuple[dict[str, RunnerPod], str]:
    """The pods of a list by name, and the version from which to watch. Raises ValueError."""
    answer = json.loads(text)
    try:
        pods = [read(record) for record in answer["items"]]
        return {pod.name: pod for pod in pods}, str(answer["metadata"]["resourceVersion"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"an answer that is no list of pods: {error!r}") from error


class GatewayLease:
    """The Lease `name` in `namespace`, the owner of the gateway's runners.

    All calls block, for seconds at most, and raise what the client raises.
    """

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


class ManagedPods:
    """See `Source`. POD_NAME and POD_NAMESPACE identify the gateway's own pod; a template without namespace takes that.

    A container of the same pod that starts again takes over the Lease and the runners of the one before.
    """

    def __init__(self, template: Path, port: int, api: Any = None) -> None:
        """`api` is a CoreV1Api, by default the cluster's. Raises SandboxUnavailable without cluster or template."""
        self._port = port
        self._template = read_template(template)
        self._namespace = self._template["metadata"].get("namespace") or os.environ.get("POD_NAMESPACE") or "default"
        self._name = os.environ.get("POD_NAME") or f"gateway-{socket.gethostname()}-{os.getpid()}"[:63]
        self._label = f"{POOL_LABEL}={self._name}"
        self._usable = f"{self._label},!{_QUARANTINE_LABEL}"
        self._api = api or _open_api()
        self._open_calls()
        self._lease = GatewayLease(client.CoordinationV1Api(self._api.api_client), self._namespace, self._name)
        self._renewing: asyncio.Task[None] | None = None
        self._watch = watch.Watch("object")  # type: ignore[no-untyped-call] # JSON, no models
        self._watching: asyncio.Task[None] | None = None
        self._pods: dict[str, RunnerPod] = {}
        self._removed: set[str] = set()  # names that the API may still report
        self._out_of_memory: dict[str, None] = {}  # names of the last pods that were killed for it, oldest first
        self._news = asyncio.Event()  # of any pod
        self._problem = ""
        self._closed = False
        self._answered = asyncio.Event()  # the first list has succeeded or failed

    async def start(self, on_change: Callable[[], None]) -> None:
        """See `Source`."""
        self._renewing = asyncio.create_task(self._keep_renewing(), name="lease of the gateway")
        self._watching = asyncio.create_task(self._keep_watching(on_change), name="watch of the runner pods")

    async def _keep_renewing(self) -> None:
        while True:
            try:
                await self._call(self._lease.renew)
                await self._call(self._lease.sweep)
            except RunnersUnreachable as error:
                log.warning("the lease of this gateway cannot be renewed", extra={"detail": str(error)})
            await asyncio.sleep(RENEW_EVERY_S)

    async def _keep_watching(self, on_change: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()

        def report(kind: str, pod: RunnerPod) -> None:
            if kind == "DELETED":
                self._pods.pop(pod.name, None)
                self._removed.discard(pod.name)
            elif pod.name not in self._removed:
                self._pods[pod.name] = pod
            self._note_ends([pod])
            on_change()

        def later(event: Any) -> None:
            loop.call_soon_threadsafe(report, event["type"], self._read(event["object"]))

        while not self._closed:
            try:
                version = await self._resync()
                on_change()
                await self._call(partial(self._follow, version, later))
            except RunnersUnreachable as error:
                self._problem = str(error)
                self._answered.set()
                on_change()
                if not self._closed:
                    await asyncio.sleep(_RETRY_S)

    async def _resync(self) -> str:
        """List all pods. Returns the version from which to watch. Raises RunnersUnreachable."""
        pods, version = await self._call(
            lambda: read_pods(self._list_objects(**self._raw(), label_selector=self._usable).data, self._read)
        )
        self._note_ends(pods.values())
        self._removed &= pods.keys()
        self._pods = {name: pod for name, pod in pods.items() if name not in self._removed}
        self._problem = ""
        self._answered.set()
        return str(version)

    def _follow(self, version: str, report: Callable[[Any], object]) -> None:
        """Report every change after `version`, for `_RESYNC_S` seconds or until the API has forgotten the version."""
        arguments = {"namespace": self._namespace, "label_selector": self._usable, "resource_version": version}
        limits = {"timeout_seconds": _RESYNC_S, "_request_timeout": (_TIMEOUTS_S[0], _RESYNC_S + _TIMEOUTS_S[1])}
        try:
            pods = self._watch.stream(self._list_objects, **arguments, **limits)  # type: ignore[no-untyped-call]
            for event in pods:
                report(event)
        except ApiException as error:
            if error.status != 410:
                raise

    async def _stop_watching(self, watching: asyncio.Task[None]) -> None:
        """End the watch and its thread within `_STOP_LIMIT_S` seconds.

        The stop is repeated, because it has no effect on a watch that is just starting.
        """
        self._closed = True
        end_s = asyncio.get_running_loop().time() + _STOP_LIMIT_S
        while not watching.done() and asyncio.get_running_loop().time() < end_s:
            await asyncio.to_thread(self._watch.stop)
            await asyncio.wait({watching}, timeout=0.05)
        watching.cancel()

    def _note_ends(self, pods: Iterable[RunnerPod]) -> None:
        """Remember which pods lacked memory: they are removed at once, and asked for later."""
        self._out_of_memory |= {pod.name: None for pod in pods if pod.lacked_memory}
        for name in list(self._out_of_memory)[:-_MAX_OUT_OF_MEMORY]:
            del self._out_of_memory[name]
        self._news.set()

    async def lacked_memory(self, runner: FoundRunner) -> bool:
        """See `Source`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_NEWS_LIMIT_S):
                while (pod := self._pods.get(runner.name)) is not None and not pod.has_ended:
                    self._news.clear()
                    await self._news.wait()
        return runner.name in self._out_of_memory

    async def list(self) -> Sequence[FoundRunner]:
        """See `Source`. Pods that have ended are removed."""
        await self._answered.wait()  # bounded, because each call to the API is bounded
        if self._problem:
            raise RunnersUnreachable(self._problem)
        found = []
        for pod in list(self._pods.values()):
            if pod.is_leaving:
                continue
            one = FoundRunner(pod.name, (pod.ip, self._port) if pod.ip else None, waits_for=pod.waits_for)
            if pod.has_ended:
                await self.remove(one)
            else:
                found.append(one)
        return found

    async def create(self) -> str | None:
        """See `Source`."""
        body = copy.deepcopy(self._template)
        metadata = body["metadata"]
        metadata["namespace"] = self._namespace
        metadata.setdefault("labels", {})[POOL_LABEL] = self._name
        metadata["ownerReferences"] = [await self._call(self._lease.owner)]
        made = await self._call(lambda: self._read(json.loads(self._create_object(**self._raw(), body=body).data)))
        self._pods.setdefault(made.name, made)
        return str(made.name)

    async def remove(self, runner: FoundRunner) -> None:
        """See `Source`. The pod is killed without a grace period."""
        pod = self._pods.pop(runner.name, None)
        self._removed.add(runner.name)
        try:
            await self._call(
                lambda: self._delete_object(name=runner.name, **self._raw(), grace_period_seconds=0).data,
                may_be_gone=True,
            )
        except RunnersUnreachable:
            self._removed.discard(runner.name)
            if pod is not None:
                self._pods.setdefault(runner.name, pod)
            raise

    async def quarantine(self, runner: FoundRunner) -> None:
        """See `Source`. The newest three quarantined pods are kept."""
        patch = {"metadata": {"labels": {_QUARANTINE_LABEL: "true"}}}
        await self._call(lambda: self._patch_object(name=runner.name, **self._raw(), body=patch).data, may_be_gone=True)
        selector = f"{self._label},{_QUARANTINE_LABEL}"
        found = await self._call(
            lambda: json.loads(self._list_objects(**self._raw(), label_selector=selector).data)["items"]
        )
        by_age = sorted((one["metadata"] for one in found), key=lambda metadata: metadata["creationTimestamp"])
        for metadata in by_age[:-_MAX_QUARANTINED]:
            await self.remove(FoundRunner(metadata["name"], None))

    async def close(self) -> None:
        """See `Source`."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        if self._watching is not None:
            await self._stop_watching(self._watching)
        await self._call(self._end_objects)
        await self._call(self._lease.end)

    def _open_calls(self) -> None:
        """Choose the calls of the API. `_read` is what a gateway keeps of an answer; it may block, in a thread."""
        self._read: Callable[[Mapping[str, Any]], RunnerPod] = read_pod
        self._list_objects = self._api.list_namespaced_pod
        self._create_object = self._api.create_namespaced_pod
        self._delete_object = self._api.delete_namespaced_pod
        self._patch_object = self._api.patch_namespaced_pod

    def _end_objects(self) -> None:
        """End all objects of this gateway at once. Kubernetes would end them with the Lease, but some time later."""
        options = {"label_selector": self._label, "grace_period_seconds": 0}
        self._api.delete_collection_namespaced_pod(**self._at(), **options)

    def _at(self) -> dict[str, Any]:
        return {"namespace": self._namespace, "_request_timeout": _TIMEOUTS_S}

    def _raw(self) -> dict[str, Any]:
        """As `_at`; the answer has its text in `data`, which must be read so that the connection is used again."""
        return self._at() | {"_preload_content": False}

    async def _call(self, call: Callable[[], Any], *, may_be_gone: bool = False) -> Any:
        """The answer; None for an object that is gone, where that may be. Raises RunnersUnreachable."""
        try:
            return await asyncio.to_thread(call)
        except ApiException as error:
            if error.status == 404 and may_be_gone:
                return None
            raise RunnersUnreachable(f"the Kubernetes API refuses the request: {_reason(error)}") from error
        except (HTTPError, OSError) as error:
            raise RunnersUnreachable(f"the Kubernetes API does not answer: {error}"[:300]) from error
        except ValueError as error:  # a proxy's page, for example
            raise RunnersUnreachable(f"the answer of the Kubernetes API cannot be read: {error}"[:300]) from error


def _reason(error: ApiException) -> str:
    try:
        return str(json.loads(error.body or "")["message"])[:300]
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"


def read_template(path: Path) -> dict[str, Any]:
    """The object that a gateway makes for each runner: a Pod or a SandboxClaim. Raises SandboxUnavailable."""
    try:
        template = json.loads(path.read_text(encoding="utf-8-sig"))
        if template["kind"] not in ("Pod", "SandboxClaim") or not template["metadata"]["generateName"]:
            raise ValueError("it is not a Pod or a SandboxClaim with a metadata.generateName")
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
            "the gvisor sandbox cannot start: no Kubernetes API is configured; run the gateway in a pod with a service"
            " account that may make pods, set KUBECONFIG, or set verifier.sandbox.pool_managed = false"
        ) from error
    return client.CoreV1Api()
