"""The API of a cluster with a release, over real HTTP and WebSockets: lists, logs and ports of pods."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

Object = dict[str, Any]


def made(component: str, *, release: str = "mine", replicas: int = 1) -> Object:
    """A Deployment."""
    return {"metadata": _metadata(f"{release}-{component}", component, release), "spec": {"replicas": replicas}}


def pod(component: str, *ports: tuple[str, int], release: str = "mine", container: str = "", **status: Any) -> Object:
    """A pod with one container, which is ready if `status` says nothing else."""
    container = container or component
    state = {"name": container, "ready": True, "restartCount": 0, "state": {"running": {}}}
    ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}], "containerStatuses": [state]}
    named = [{"name": name, "containerPort": number} for name, number in ports]
    return {
        "metadata": _metadata(f"{release}-{component}-7", component, release),
        "spec": {"containers": [{"name": container, "ports": named}]},
        "status": status or ready,
    }


def not_ready(*containers: Object, **status: Any) -> Object:
    """The status of a pod with these states of its containers."""
    found = [{"ready": False, "restartCount": 3, **one} for one in containers]
    conditions = [{"type": "Ready", "status": "False"}, *status.pop("conditions", ())]
    return {"phase": "Pending", "conditions": conditions, "containerStatuses": found, **status}


def warning(of: str, reason: str, message: str, at: str = "2026-11-29T09:00:00Z") -> Object:
    """An event."""
    return {"involvedObject": {"name": of}, "reason": reason, "message": message, "lastTimestamp": at}


def _metadata(name: str, component: str, release: str) -> Object:
    labels = {"part-of": "nouscoder", "instance": release, "component": component}
    return {"name": name, "labels": {f"app.kubernetes.io/{key}": value for key, value in labels.items()}}


@dataclass
class FakeCluster:
    """`logs` by pod and container; a key with "previous" is that of the container before. `refused` maps kinds to a
    status. `places` maps ports of pods to those of this machine; a port that is missing refuses connections.
    """

    pods: list[Object] = field(default_factory=list)
    deployments: list[Object] = field(default_factory=list)
    statefulsets: list[Object] = field(default_factory=list)
    events: list[Object] = field(default_factory=list)
    logs: dict[tuple[str, ...], str] = field(default_factory=dict)
    secrets: dict[str, Object] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    namespace: str = "team"
    asked: list[str] = field(default_factory=list)

    def answer(self, connection: ServerConnection, request: Request) -> Response | None:
        """The answer of a GET; None for a WebSocket."""
        path, query = urlsplit(request.path).path, parse_qs(urlsplit(request.path).query)
        self.asked.append(request.path)
        namespace, *words = path.partition("/namespaces/")[2].split("/")
        kind = f"pods/{words[2]}" if len(words) > 2 else words[0]
        if kind in self.refused:
            return _response(self.refused[kind], json.dumps({"message": "refused"}))
        if kind == "pods/portforward":
            return None
        if kind == "pods/log":
            previous = ("previous",) if "previous" in query else ()
            text = self.logs.get((words[1], query["container"][0], *previous))
            return _response(400, "{}") if text is None else _response(200, text)
        if kind == "secrets":
            return _response(200, json.dumps(self.secrets[words[1]]))
        return _response(200, json.dumps({"items": getattr(self, kind) if namespace == self.namespace else []}))

    def carry(self, connection: ServerConnection) -> None:
        """Connect the WebSocket to a port as the kubelet does; the other side may end at any time."""
        with suppress(ConnectionClosed):
            self._carry(connection)

    def _carry(self, connection: ServerConnection) -> None:
        port = int(parse_qs(urlsplit(connection.request.path).query)["ports"][0])  # type: ignore[union-attr]
        for channel in (b"\0", b"\1"):
            connection.send(channel + port.to_bytes(2, "little"))
        try:
            place = socket.create_connection(("127.0.0.1", self.places[port]))
        except (KeyError, OSError):
            connection.send(b"\1" + f"connect to port {port}: connection refused".encode())
            return
        threading.Thread(target=_send, args=(place, connection), daemon=True).start()
        with place, suppress(OSError, ConnectionClosed):
            for message in connection:
                place.sendall(message[1:])  # type: ignore[arg-type]
            place.shutdown(socket.SHUT_RDWR)


def _send(place: socket.socket, connection: ServerConnection) -> None:
    with suppress(OSError, ConnectionClosed):
        while data := place.recv(4096):
            connection.send(b"\0" + data)
    connection.close()


def _response(status: int, text: str) -> Response:
    body = text.encode()
    return Response(status, "status", Headers({"Content-Length": str(len(body)), "Connection": "close"}), body)


@contextmanager
def serving(cluster: FakeCluster, kubeconfig: Path, namespace: str = "team") -> Iterator[None]:
    """Serve it, and write the kubeconfig that leads there."""
    v4: Any = ["v4.channel.k8s.io"]
    server = serve(cluster.carry, "127.0.0.1", 0, process_request=cluster.answer, subprotocols=v4, compression=None)
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        write_kubeconfig(kubeconfig, f"http://127.0.0.1:{server.socket.getsockname()[1]}", namespace)
        yield


def write_kubeconfig(file: Path, server: str, namespace: str = "team") -> None:
    """A kubeconfig with one context."""
    context = {"name": "c", "context": {"cluster": "c", "user": "u", "namespace": namespace}}
    users = [{"name": "u", "user": {"token": "x"}}]
    tree = {"clusters": [{"name": "c", "cluster": {"server": server}}], "users": users, "contexts": [context]}
    file.write_text(yaml.safe_dump(tree | {"current-context": "c"}))
