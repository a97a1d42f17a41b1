"""Processes in a runner pod reach no peer: a candidate has no network, and network policies stop a process that has
escaped into the pod. The same peers answer allowed clients.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import Any

import pytest

from nouscoder.client import AsyncClient

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

COMPONENTS = {"redis", "broker", "verifier", "sandbox", "generation", "learner"}
SMALL = (
    "config.run.total_batches=400",
    "config.problems.held_out_samples=1",
    "config.demo.held_out_problems=20",
    "config.demo.train_problems=200",
    "config.demo.warm_start_share=0.05",
)
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


@pytest.fixture(scope="module")
def loop(release: Any) -> Any:
    """A ready release with the loop enabled."""
    release.install(*(word for value in SMALL for word in ("--set-json", value)))
    release.until(lambda: release.all_ready(COMPONENTS), "every pod is ready", 420)
    return release


@pytest.fixture(scope="module")
def places(loop: Any) -> Places:
    """The peers in this cluster."""
    namespaces = (loop.namespace, loop.runners)
    items = [
        item
        for namespace in namespaces
        for item in json.loads(loop.kubectl("get", "pods", "-n", namespace, "-o", "json"))["items"]
    ]
    address: dict[str, list[dict[str, Any]]] = {}
    for item in items:
        address.setdefault(item["metadata"]["labels"].get("app.kubernetes.io/component", ""), []).append(item["status"])
    services = json.loads(loop.kubectl("get", "services", "-o", "json"))["items"]
    api = json.loads(loop.kubectl("get", "service", "kubernetes", "-n", "default", "-o", "json"))["spec"]["clusterIP"]
    dns = json.loads(loop.kubectl("get", "service", "kube-dns", "-n", "kube-system", "-o", "json"))["spec"]["clusterIP"]
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


async def test_a_candidate_has_no_network(loop: Any, places: Places) -> None:
    token = loop.secret("nouscoder-verifier-tokens", "token")
    with loop.forward("svc/nouscoder-verifier", 8080) as port:
        async with AsyncClient(f"http://127.0.0.1:{port}", token=token) as client:
            answer = await client.grade(
                code=program(places.all, NAMES),
                tests={"type": "stdin", "cases": [{"input": "", "output": "reached []"}]},
                limits={"wall_time_s": 60, "cpu_time_s": 30, "memory_bytes": 256 << 20},
            )
    assert answer["verdict"] == "accepted", answer
    assert answer["backend"] == "gvisor"
    print(f"{len(places.all)} places, {len(NAMES)} names: none reached by a candidate")


def test_a_process_in_the_pods_network_namespace_reaches_no_peer(loop: Any, places: Places) -> None:
    """Candidates are not in the runner's network namespace. Inside it, only the NetworkPolicy protects."""
    pod = loop.pod("sandbox")
    own = json.loads(loop.kubectl("get", "pod", pod.name, "-n", pod.namespace, "-o", "json"))["status"]["podIP"]
    others = [place for place in places.all if place[0] != own]
    said = _inside(pod, "runner", program(others, NAMES))
    assert said == "reached []"


def test_the_same_peers_answer_allowed_clients(loop: Any, places: Places) -> None:
    """Shows that the two tests above could have reached the peers without the policy."""
    pod = loop.pod("verifier")
    said = _inside(pod, "verifier", program(places.of_verifier, NAMES[:1]))
    wanted = [*map(list, places.of_verifier), [NAMES[0], 80, "name"]]
    assert said == f"reached {wanted}"


def test_other_pods_reach_neither_runners_nor_redis(loop: Any, places: Places) -> None:
    """Tests from the generation pod, which needs neither of them."""
    closed = [place for place in places.all if place[1] in (7070, 6379)]
    assert len(closed) >= 3
    assert _inside(loop.pod("generation"), "generation", program(closed, [])) == "reached []"


def _inside(pod: Any, container: str, code: str) -> str:
    command = ["kubectl", "-n", pod.namespace, "exec", "-i", pod.name, "-c", container, "--", "python3", "-"]
    done = subprocess.run(command, input=code, capture_output=True, text=True, timeout=180, check=True)
    return done.stdout.strip()
