"""The peers of a runner pod in a release, and programs that tell which of them a process reaches."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import Any

# All at once, because the pool proves an idle runner anew every two minutes, and that ends every process in its pod.
LOOK = """
import asyncio, os, socket
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"

async def reaches(place):
    host, port, kind = place
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM) as s:
        s.setblocking(False)
        try:
            await asyncio.wait_for(loop.sock_connect(s, (host, port)), 2)
            if kind == "udp":
                question = "1234010000010000000000000a6b756265726e6574657307646566617566740000010001"
                await loop.sock_sendall(s, bytes.fromhex(question))
                await asyncio.wait_for(loop.sock_recv(s, 512), 2)
            return True
        except OSError:
            return False

async def knows(name):
    try:
        await asyncio.get_running_loop().getaddrinfo(name, 80)
        return True
    except OSError:
        return False

async def main():
    peers = [*PLACES, *([name, 80, "name"] for name in NAMES)]
    answers = await asyncio.gather(*map(reaches, PLACES), *map(knows, NAMES))
    print("reached", [peer for peer, reached in zip(peers, answers) if reached])

asyncio.run(main())
"""
NAMES = ["kubernetes.default.svc.cluster.local", "nouscoder-broker", "localhost.localdomain.example"]


@dataclass(frozen=True)
class Places:
    """The (host, port, kind) of every peer that must not be reached, and of those that the verifier may reach."""

    all: list[tuple[str, int, str]]
    of_verifier: list[tuple[str, int, str]]


def places_of(release: Any) -> Places:
    """The peers in the cluster of a release."""
    namespaces = (release.namespace, release.runners)
    items = [
        item
        for namespace in namespaces
        for item in json.loads(release.kubectl("get", "pods", "-n", namespace, "-o", "json"))["items"]
    ]
    address: dict[str, list[dict[str, Any]]] = {}
    for item in items:
        address.setdefault(item["metadata"]["labels"].get("app.kubernetes.io/component", ""), []).append(item["status"])
    services = json.loads(release.kubectl("get", "services", "-o", "json"))["items"]
    api, dns = (
        json.loads(release.kubectl("get", "service", name, "-n", namespace, "-o", "json"))["spec"]["clusterIP"]
        for name, namespace in (("kubernetes", "default"), ("kube-dns", "kube-system"))
    )
    node = address["verifier"][0]["hostIP"]
    runners = [status["podIP"] for status in address["sandbox"] if "podIP" in status]
    gateway = address["verifier"][0]["podIP"]
    found = [(api, 443, "tcp"), (dns, 53, "tcp"), (dns, 53, "udp"), (node, 10250, "tcp"), (node, 6443, "tcp")]
    found += [(host, 7070, "tcp") for host in runners]
    found += [(gateway, port, "tcp") for port in (8080, 50051, 9090, 8086)]
    found += [(address["redis"][0]["podIP"], 6379, "tcp"), (address["broker"][0]["podIP"], 50052, "tcp")]
    found += [(address["learner"][0]["podIP"], port, "tcp") for port in (50054, 8090)]
    for service in services:
        ip = service["spec"]["clusterIP"]
        found += [(ip, port["port"], "tcp") for port in service["spec"]["ports"] if ip != "None"]
    broker = (address["broker"][0]["podIP"], 50052, "tcp")
    return Places(found, [(api, 443, "tcp"), (dns, 53, "udp"), (runners[0], 7070, "tcp"), broker])


def program(places: list[tuple[str, int, str]], names: list[str]) -> str:
    """A program that prints which of these peers it can reach."""
    return f"PLACES, NAMES = {[list(place) for place in places]!r}, {names!r}\n{LOOK}"


def said_inside(pod: Any, container: str, code: str) -> str:
    """What the code prints in a container of the pod."""
    command = ["kubectl", "-n", pod.namespace, "exec", "-i", pod.name, "-c", container, "--", "python3", "-"]
    done = subprocess.run(command, input=code, capture_output=True, text=True, timeout=180, check=True)
    return done.stdout.strip()
