"""A release of the chart as one sees it from outside the cluster: why a pod is not ready, logs, connections.

INVARIANT: nothing is changed, and no Secret and no ConfigMap is read, but the certificate of a broker with TLS.
docs/operating.md has the Role that this needs.
"""

from __future__ import annotations

import re
import select
import socket
import ssl
import threading
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import websocket
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.stream import stream

from nouscoder.doctor.cluster.client import REQUEST_LIMIT_S, Cluster, ClusterError, Document, NoRelease, api_errors
from nouscoder.errors import WrongUse, one_line

_INSTANCE, _COMPONENT = "app.kubernetes.io/instance", "app.kubernetes.io/component"
_TLS_FILE = "tls/tls.crt"  # in the volume of a pod with TLS
_TLS_KEYS = ("tls.crt", "tls.key", "ca.crt")
_LOG_BYTES = 4 * 1024**2
_STALLED_S = 30.0
Line = tuple[str, str, str, str]  # time, container, pod, text
# The node's time of a line has its zone. Other text is the node's own.
_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)) (.*)")


@dataclass(frozen=True, slots=True)
class BrokerTls:
    """What a client of a broker with TLS needs: the name in its certificate, and the files of its Secret."""

    server_name: str
    files: Mapping[str, bytes]


class InstalledRelease(Cluster):
    """A release, the only one of the namespace if no name is given. Raises NoRelease, WrongUse, ClusterError."""

    def __init__(self, api: Any, namespace: str, name: str = "") -> None:
        super().__init__(api)
        self._namespace, self._name = namespace, ""
        websocket.setdefaulttimeout(REQUEST_LIMIT_S)
        there = sorted({_label(one, _INSTANCE) for one in (*self._own("pods"), *self._makers())})
        if not there or (name and name not in there):
            known = f"there are {', '.join(there)}" if there else "name another namespace with -n"
            raise NoRelease(f"no release {f'{name} ' if name else ''}of nouscoder in namespace {namespace}: {known}")
        if not name and len(there) > 1:
            raise WrongUse(f"namespace {namespace} has several releases, name one by --release: {', '.join(there)}")
        self._name = name or there[0]

    def __str__(self) -> str:
        return f"release {self._name} in namespace {self._namespace}"

    def _own(self, kind: str, group: str = "/api/v1") -> list[Document]:
        path = f"{group}/namespaces/{self._namespace}/{kind}"
        found = self.objects(path, label_selector="app.kubernetes.io/part-of=nouscoder")
        return [
            one for one in found if self._name in ("", _label(one, _INSTANCE)) and _label(one, _COMPONENT) != "test"
        ]

    def _makers(self) -> list[Document]:
        return [one for kind in ("deployments", "statefulsets") for one in self._own(kind, "/apis/apps/v1")]

    def troubles(self) -> list[str]:
        """One sentence for each pod that is not ready, and for each component with fewer pods than wanted."""
        warnings = self.objects(f"/api/v1/namespaces/{self._namespace}/events", field_selector="type=Warning")
        warnings.sort(key=lambda one: str(one.get("lastTimestamp") or one.get("eventTime") or ""))
        pods = self._own("pods")
        there = [_label(one, _COMPONENT) for one in pods if one["status"]["phase"] not in ("Succeeded", "Failed")]
        whys = {_name(one): self._why_not_ready(one, warnings, there) for one in pods}
        found = [f"pod {name} {why}" for name, why in whys.items() if why]
        for maker in self._makers():
            component, wanted = _label(maker, _COMPONENT), maker["spec"].get("replicas", 1)
            if not wanted:
                found.append(f"{component} is scaled to 0 pods")
            elif there.count(component) < wanted:
                why = _newest(warnings, _name(maker)) or "no event says why"
                found.append(f"{component} has {there.count(component)} of {wanted} pods: {why}")
        return found

    def _why_not_ready(self, pod: Document, warnings: Sequence[Document], there: Sequence[str]) -> str:
        """What to say after its name; "" when it is ready, has done its work, or has failed and was replaced."""
        status = pod["status"]
        conditions = {one["type"]: one for one in status.get("conditions") or ()}
        is_ready = conditions.get("Ready", {}).get("status") == "True" or status["phase"] == "Succeeded"
        if is_ready or (status["phase"] == "Failed" and _label(pod, _COMPONENT) in there):
            return ""
        if "deletionTimestamp" in pod["metadata"]:
            return "is being deleted"
        for one in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
            waiting = one["state"].get("waiting") or {}
            ended = one["state"].get("terminated") or (one.get("lastState") or {}).get("terminated")
            if ended and ended["exitCode"] and not one["ready"]:
                text = ended.get("message") or self._log(_name(pod), one["name"], previous=True, tail_lines=9)
                last = (text.strip().splitlines() or ["its log is empty"])[-1]
                code = f"exit code {ended['exitCode']} ({ended.get('reason', 'Error')})"
                return f"is not ready: its container {one['name']} ended with {code}: {_said(last)}"
            if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
                return f"is not ready: its container {one['name']} waits: {_said(**waiting)}"
        if conditions.get("PodScheduled", {}).get("status") == "False":
            return f"is Pending: {_said(**conditions['PodScheduled'])}"
        begun = [one["name"] for one in status.get("initContainerStatuses") or () if "running" in one["state"]]
        now = f"its container {begun[0]} is at work" if begun else "it is starting"
        said = _said(**status) or _newest(warnings, _name(pod)) or now
        return f"is {status['phase']}, not ready: {said}"

    def logs(self, tail: int) -> list[list[Line]]:
        """The newest `tail` lines of each container that has begun."""

        def lines(names: tuple[str, str]) -> list[Line]:
            found = map(_LINE.fullmatch, self._log(*names, timestamps=True, tail_lines=tail).split("\n"))
            return [(line[1], names[1], names[0], line[2]) for line in found if line]

        asked = [
            (_name(pod), container["name"])
            for pod in self._own("pods")
            for container in (*(pod["spec"].get("initContainers") or ()), *pod["spec"]["containers"])
        ]
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lines, asked))

    def _log(self, pod: str, container: str, **options: Any) -> str:
        """Empty for a container that waits to start, and for a pod that is gone."""
        options |= {"limit_bytes": _LOG_BYTES, "_request_timeout": REQUEST_LIMIT_S, "_preload_content": False}
        try:
            with api_errors(f"get pods/log in namespace {self._namespace}", keep=(400, 404)):
                answer = self._core.read_namespaced_pod_log(pod, self._namespace, container=container, **options)
        except ApiException:
            return ""
        return str(answer.data.decode("utf8", "replace"))

    def broker_tls(self) -> BrokerTls | None:
        """None for a broker without TLS. Raises ClusterError, also where this account may not read the certificate."""
        hosts = [_name(one) for one in self._makers() if _label(one, _COMPONENT) == "broker"]
        sources = [
            source["secret"]
            for pod in self._own("pods")
            if _label(pod, _COMPONENT) == "broker"
            for volume in pod["spec"].get("volumes") or ()
            for source in volume.get("projected", {}).get("sources") or ()
            if _TLS_FILE in [item["path"] for item in source.get("secret", {}).get("items") or ()]
        ]
        if not sources or not hosts:
            return None
        name = sources[0]["name"]
        with api_errors(f"get secret {name} in namespace {self._namespace}, which the broker's TLS needs"):
            data = self._core.read_namespaced_secret(name, self._namespace, _request_timeout=REQUEST_LIMIT_S).data
        if missing := [key for key in _TLS_KEYS if key not in (data or {})]:
            raise ClusterError(f"secret {name} in namespace {self._namespace} has no {missing[0]}")
        return BrokerTls(f"{hosts[0]}.{self._namespace}.svc", {key: b64decode(data[key]) for key in _TLS_KEYS})

    def connect(self, container: str, port_name: str) -> Any:
        """A WebSocket that carries a connection to this port of a running container. Raises ClusterError."""
        for pod in self._own("pods"):
            running = {one["name"] for one in pod["status"].get("containerStatuses") or () if "running" in one["state"]}
            for one in pod["spec"]["containers"]:
                port = {port.get("name"): port["containerPort"] for port in one.get("ports") or ()}.get(port_name)
                if port and one["name"] in {container} & running:
                    # With a client of its own: `stream` changes it while it connects.
                    ask = client.CoreV1Api(
                        client.ApiClient(self._api.configuration)
                    ).connect_get_namespaced_pod_portforward
                    with api_errors(f"get and create pods/portforward in namespace {self._namespace}"):
                        options = {"ports": str(port), "_preload_content": False, "binary": True}
                        return stream(ask, _name(pod), self._namespace, **options).sock
        raise ClusterError(f"{self} has no running container {container}: {'; '.join(self.troubles())}")

    def forward(self, listener: socket.socket, container: str, port_name: str, say: Callable[[str], object]) -> None:
        """Connect those who connect to `listener` to that port until it is shut down; `say` gets each new fault."""
        told = ""
        while True:
            try:
                near = listener.accept()[0]
            except OSError:
                return
            try:
                far = self.connect(container, port_name)
            except ClusterError as error:
                near.close()
                if str(error) != told:
                    say(told := str(error))
            else:
                threading.Thread(target=_relay, args=(near, far, say), daemon=True).start()


def _relay(near: socket.socket, far: Any, say: Callable[[str], object]) -> None:
    """Copy both ways until one side ends, or takes nothing for _STALLED_S.

    A message begins with its channel, 0 for data and 1 for an error. The first one of a channel only names the port.
    """
    begun: set[int] = set()
    near.settimeout(_STALLED_S)
    with closing(near), suppress(OSError, websocket.WebSocketException), closing(far):
        while True:
            is_decrypted = isinstance(far.sock, ssl.SSLSocket) and far.sock.pending()
            ready = [far.sock] if is_decrypted else select.select([near, far.sock], [], [])[0]
            if near in ready:
                if not (data := near.recv(65536)):
                    return
                far.send_binary(b"\0" + data)
            if far.sock in ready:
                kind, frame = far.recv_data_frame(control_frame=True)
                if kind == websocket.ABNF.OPCODE_CLOSE:
                    return
                if kind != websocket.ABNF.OPCODE_BINARY:
                    continue
                if (channel := frame.data[0]) not in begun:
                    begun.add(channel)
                elif channel:
                    say(frame.data[1:].decode("utf8", "replace"))
                    return
                else:
                    near.sendall(frame.data[1:])


def _label(one: Document, name: str) -> str:
    return str((one["metadata"].get("labels") or {}).get(name, ""))


def _name(one: Document) -> str:
    return str(one["metadata"]["name"])


def _said(message: str = "", reason: str = "", **_: Any) -> str:
    return one_line(": ".join(filter(None, (reason, message))))[:500]


def _newest(warnings: Sequence[Document], of: str) -> str:
    """What the newest says of the object, or of the ReplicaSet that it made."""
    named = re.compile(rf"{re.escape(of)}(-[a-z0-9]+)?")
    return next((_said(**one) for one in reversed(warnings) if named.fullmatch(one["involvedObject"]["name"])), "")
