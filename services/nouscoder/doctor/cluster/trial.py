"""The trial of a cluster: pods in a namespace of their own, which say whether gVisor and network policies work.

INVARIANT: all trial objects are in one namespace with a unique name. Its removal is requested however the trial ends.
Each pod ends after `_POD_LIFE_S`, so that a killed trial leaves nothing running.
"""

from __future__ import annotations

import inspect
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kubernetes import client
from kubernetes.client.exceptions import ApiException

from nouscoder.doctor.cluster.client import REQUEST_LIMIT_S, ClusterError, api_errors
from nouscoder.verifier.runner import kernel

Answer = TypeVar("Answer")

PORT = 8080
_POD_LIFE_S = 180
_TICK_S = 0.5
_REMOVAL_LIMIT_S = 60.0

_LISTEN = """
import socket
server = socket.create_server(("", PORT))
while True:
    server.accept()[0].close()
"""
# Connects until it is refused. Exit codes: 0 first open, then closed; 3 never open; 4 never closed.
_KNOCK = """
import socket, sys, time
def may():
    try:
        socket.create_connection(("ADDRESS", PORT), timeout=1).close()
    except OSError:
        return False
    return True
def until(wanted, limit_s, times):
    end, seen = time.monotonic() + limit_s, 0
    while time.monotonic() < end and seen < times:
        seen = seen + 1 if may() == wanted else 0
        time.sleep(0.2)
    return seen >= times
if not until(True, 30, 1):
    sys.exit(3)
print("open", flush=True)
sys.exit(0 if until(False, 25, 5) else 4)
"""
_LOOK = f"{inspect.getsource(kernel)}\nimport json\nprint(json.dumps(kernel_facts()))\n"


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What a trial found, or the error that prevented it. `kernel`: None when no pod of the RuntimeClass was tried."""

    kernel: kernel.Facts | ClusterError | None
    policy_enforced: bool | ClusterError


class Trial:
    """A context manager that makes the namespace on entry and removes it on exit. Raises NotAllowed, ClusterError."""

    def __init__(self, api: Any, image: str, patience_s: float) -> None:
        self._core: Any = client.CoreV1Api(api)
        self._networking: Any = client.NetworkingV1Api(api)
        self._image = image
        self._patience_s = patience_s
        self.namespace = f"nouscoder-doctor-{secrets.token_hex(3)}"

    def __enter__(self) -> Trial:
        labels = {
            "app.kubernetes.io/managed-by": "nouscoder-doctor",
            "pod-security.kubernetes.io/enforce": "restricted",
        }
        body = {"metadata": {"name": self.namespace, "labels": labels}}
        with api_errors("create namespaces"):
            self._core.create_namespace(body, _request_timeout=REQUEST_LIMIT_S)
        return self

    def __exit__(self, *error: object) -> None:
        try:
            with api_errors(f"remove the namespace {self.namespace}"):
                options = {"grace_period_seconds": 0, "_request_timeout": REQUEST_LIMIT_S}
                self._core.delete_collection_namespaced_pod(self.namespace, **options)
                self._core.delete_namespace(self.namespace, _request_timeout=REQUEST_LIMIT_S)
                self._until("the end of the namespace", self._is_gone, _REMOVAL_LIMIT_S)
        except ClusterError as failure:
            raise ClusterError(f"{failure}; remove it: kubectl delete namespace {self.namespace}") from None

    def _is_gone(self) -> bool | None:
        try:
            self._core.read_namespace(self.namespace, _request_timeout=REQUEST_LIMIT_S)
        except ApiException as error:
            if error.status in (403, 404):
                return True
            raise
        return None

    def kernel_of(self, runtime_class: str) -> kernel.Facts:
        """What the kernel of a pod of this RuntimeClass answers."""
        self._start("look", _LOOK, runtimeClassName=runtime_class)
        self._ended("look")
        said = self._log("look")
        try:
            return dict(json.loads(said))
        except ValueError:
            raise ClusterError(f"the pod look did not say what its kernel answers: {said[-200:]}") from None

    def policy_is_enforced(self) -> bool:
        """Whether a connection between two pods is refused once a policy denies it."""
        self._start("listener", _LISTEN)
        address = self._until("the address of the pod listener", lambda: self._address("listener"), self._patience_s)
        self._start("knocker", _KNOCK.replace("ADDRESS", address))
        self._until("a first connection", self._knocked, self._patience_s)
        deny = {"metadata": {"name": "deny"}, "spec": {"podSelector": {}, "policyTypes": ["Ingress"]}}
        with api_errors("create networkpolicies"):
            self._networking.create_namespaced_network_policy(self.namespace, deny, _request_timeout=REQUEST_LIMIT_S)
        exit_code = self._ended("knocker")
        if exit_code not in (0, 4):
            raise ClusterError(f"the pods could not reach each other before any policy (exit code {exit_code})")
        return exit_code == 0

    def _knocked(self) -> bool | None:
        return True if self._log("knocker").startswith("open") or self._code("knocker") is not None else None

    def _start(self, name: str, script: str, **more: str) -> None:
        """Create a pod. Retries while the namespace's service account is being made."""
        body = self._pod(name, script.replace("PORT", str(PORT)))
        body["spec"].update(more)

        def create() -> bool | None:
            try:
                self._core.create_namespaced_pod(self.namespace, body, _request_timeout=REQUEST_LIMIT_S)
            except ApiException as error:
                text = str(error.body)
                if error.status == 403 and "serviceaccount" in text and "not found" in text:
                    return None
                if error.status == 403 and "PodSecurity" in text:
                    raise ClusterError(f"the pod {name} was refused: {text}") from None
                raise
            return True

        with api_errors("create pods"):
            self._until("a service account", create, self._patience_s)

    def _pod(self, name: str, script: str) -> dict[str, Any]:
        container = {
            "name": name, "image": self._image, "imagePullPolicy": "IfNotPresent", "command": ["python3", "-c", script],
            "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "256Mi"}},
            "securityContext": {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
            },
        }  # fmt: skip
        user = {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}}
        spec = {
            "containers": [container], "securityContext": user, "automountServiceAccountToken": False,
            "enableServiceLinks": False, "restartPolicy": "Never", "activeDeadlineSeconds": _POD_LIFE_S,
            "terminationGracePeriodSeconds": 0,
        }  # fmt: skip
        return {"metadata": {"name": name}, "spec": spec}

    def _read(self, name: str) -> Any:
        with api_errors("read pods"):
            return self._core.read_namespaced_pod(name, self.namespace, _request_timeout=REQUEST_LIMIT_S)

    def _log(self, name: str) -> str:
        if self._code(name) is None and self._read(name).status.phase != "Running":
            return ""
        with api_errors("read the logs of pods"):
            return str(self._core.read_namespaced_pod_log(name, self.namespace, _request_timeout=REQUEST_LIMIT_S))

    def _address(self, name: str) -> str | None:
        self._code(name)
        status = self._read(name).status
        return str(status.pod_ip) if status.phase == "Running" and status.pod_ip else None

    def _ended(self, name: str) -> int:
        return self._until(f"the end of the pod {name}", lambda: self._code(name), self._patience_s)

    def _code(self, name: str) -> int | None:
        """The exit code of an ended pod, else None. Raises ClusterError for a pod that cannot start."""
        status = self._read(name).status
        if status.reason in ("DeadlineExceeded", "Evicted"):
            raise ClusterError(f"the pod {name} was ended: {status.reason}")
        for container in status.container_statuses or ():
            if container.state.terminated is not None:
                return int(container.state.terminated.exit_code)
            waiting = container.state.waiting
            if waiting is not None and (
                waiting.reason.startswith("Err") or waiting.reason.endswith(("Error", "BackOff"))
            ):
                raise ClusterError(f"the pod {name} cannot start: {waiting.reason}: {waiting.message or ''}".strip())
        return None

    def _until(self, what: str, ask: Callable[[], Answer | None], limit_s: float) -> Answer:
        end = time.monotonic() + limit_s
        while True:
            if (answer := ask()) is not None:
                return answer
            if time.monotonic() > end:
                raise ClusterError(f"waited {limit_s:.0f} s for {what}{self._events()}")
            time.sleep(_TICK_S)

    def _events(self) -> str:
        """The newest warning of the namespace, as a reason for a timeout."""
        try:
            answer = self._core.list_namespaced_event(self.namespace, _request_timeout=REQUEST_LIMIT_S)
        except ApiException:
            return ""
        warnings = [event.message for event in answer.items if event.type == "Warning" and event.message]
        return f": {warnings[-1][:300]}" if warnings else ""


def answer_or_error(question: Callable[[], Answer]) -> Answer | ClusterError:
    """The answer of the cluster, or the error that it gave."""
    try:
        return question()
    except ClusterError as error:
        return error
