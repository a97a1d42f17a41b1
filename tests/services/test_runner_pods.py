"""The runner pods of a gateway, over HTTP with a small Kubernetes API: listed, then watched, owned by its Lease."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("kubernetes", reason="install the `cluster` extra")
from kubernetes import client

from nouscoder.verifier.sandbox.runners import kubernetes_pods
from nouscoder.verifier.sandbox.runners import kubernetes_pods as pods_module
from nouscoder.verifier.sandbox.runners.kubernetes_pods import (
    LEASE_S,
    GatewayLease,
    ManagedPods,
    RunnerPod,
    read_pod,
    read_pods,
)
from nouscoder.verifier.sandbox.runners.pool import FoundRunner, RunnersUnreachable

PATH = "/api/v1/namespaces/default/pods"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
SPEC = {"containers": [{"name": "runner", "image": "sandbox"}]}


class Api:
    """A Kubernetes API: pods by name, the received requests, and the events that a watch sends until `end_watch`.

    It also has Leases by name, and `others` by path; requests for them are not in `requests`.
    """

    def __init__(self, path: str = PATH) -> None:
        self.others: dict[str, dict[str, Any]] = {}
        self.patched: list[tuple[str, dict[str, Any]]] = []
        self.pods: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.events: queue.Queue[bytes | None] = queue.Queue()
        self.status = 200
        self.refusal = ""
        self.page = b""  # is answered to a creation
        self.made: list[dict[str, Any]] = []
        self.leases: dict[str, dict[str, Any]] = {}
        self.num_leases_made = 0
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self, record: dict[str, Any], status: int | None = None) -> None:
                body = api.page or json.dumps(record).encode()
                self.send_response(status or api.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def lease(self) -> bool:
                """Answer a request for Leases."""
                path = self.path.partition("?")[0]
                if not path.startswith(LEASES):
                    return False
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
                name = path.removeprefix(LEASES).strip("/")
                answer, status = api.handle_lease(self.command, name, body)
                self.answer(answer, status)
                return True

            def do_PATCH(self) -> None:
                if self.lease():
                    return
                assert self.headers["Content-Type"] != "application/json-patch+json"
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                api.patched.append((self.path.removeprefix(f"{path}/"), body))
                self.answer({})

            def do_GET(self) -> None:
                if self.lease():
                    return
                if not self.path.startswith(path):
                    known = api.others.get(self.path)
                    self.answer(known or {}, 200 if known else 404)
                    return
                asked = parse_qs(urlsplit(self.path).query)
                if "watch" not in asked:
                    api.requests.append("list")
                    metadata = {"resourceVersion": "7"}
                    self.answer({"kind": "PodList", "metadata": metadata, "items": [*api.pods.values()]})
                    return
                api.requests.append(f"watch from {asked['resourceVersion'][0]}")
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                while (line := api.events.get()) is not None:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.write(b"0\r\n\r\n")

            def do_POST(self) -> None:
                if self.lease():
                    return
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                api.made.append(body)
                api.requests.append("create")
                made = body | {"metadata": body["metadata"] | {"name": f"made-{len(api.made)}"}, "status": {}}
                self.answer({"message": api.refusal} if api.refusal else made)

            def do_DELETE(self) -> None:
                if self.lease():
                    return
                api.requests.append(f"delete {self.path.partition('?')[0].removeprefix(path)}")
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.answer({})

            def log_message(self, format: str, *args: object) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def handle_lease(self, method: str, name: str, body: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        """The answer and the status, None for the usual one."""
        if method == "GET" and not name:
            return {"kind": "LeaseList", "metadata": {}, "items": [*self.leases.values()]}, None
        if method == "POST":
            name = body["metadata"]["name"]
            if name in self.leases:
                return {}, 409
            self.num_leases_made += 1
            body["metadata"] |= {"uid": f"uid-{self.num_leases_made}", "resourceVersion": "1"}
            self.leases[name] = body
        if name not in self.leases:
            return {}, 404
        if method == "DELETE":
            return self.leases.pop(name), None
        if method == "PATCH":
            version = int(self.leases[name]["metadata"]["resourceVersion"])
            self.leases[name]["spec"] |= body["spec"]
            self.leases[name]["metadata"]["resourceVersion"] = str(version + 1)
        return self.leases[name], None

    def send(self, kind: str, pod: dict[str, Any]) -> None:
        self.events.put(json.dumps({"type": kind, "object": pod}).encode() + b"\n")

    def end_watch(self) -> None:
        self.events.put(None)

    def close(self) -> None:
        self.end_watch()
        self._server.shutdown()
        self._server.server_close()


def pod(name: str, ip: str = "", phase: str = "Running", **metadata: str) -> dict[str, Any]:
    """A pod that is ready when it has an address."""
    conditions = [{"type": "Ready", "status": "True" if ip else "False"}]
    status = {"phase": phase, "podIP": ip, "conditions": conditions}
    return {
        "kind": "Pod",
        "metadata": {"name": name, "resourceVersion": "8", **metadata},
        "spec": SPEC,
        "status": status,
    }


def ended(name: str, reason: str) -> dict[str, Any]:
    """A pod whose container was killed."""
    record = pod(name, phase="Failed")
    record["status"]["containerStatuses"] = [{"state": {"terminated": {"exitCode": 137, "reason": reason}}}]
    return record


class Watched:
    """The source under test, and a way to wait for what it lists."""

    def __init__(self, source: ManagedPods) -> None:
        self.source = source
        self.changed = asyncio.Event()
        self.ignores_faults = False

    async def until(self, condition: Callable[[list[FoundRunner]], bool]) -> list[FoundRunner]:
        """Wait until the list fulfils `condition`. Returns the list."""
        async with asyncio.timeout(60):
            while True:
                self.changed.clear()
                try:
                    found = list(await self.source.list())
                    if condition(found):
                        return found
                except RunnersUnreachable:
                    if not self.ignores_faults:
                        raise
                await self.changed.wait()


def watched_pods(api: Api, folder: Path) -> Watched:
    template = folder / "pod.json"
    template.write_text(json.dumps({"kind": "Pod", "metadata": {"generateName": "runner-"}, "spec": SPEC}))
    configuration = client.Configuration(host=api.url)
    return Watched(ManagedPods(template, 7070, client.CoreV1Api(client.ApiClient(configuration))))


@pytest.fixture
def api() -> Any:
    made = Api()
    yield made
    made.close()


@pytest.fixture
async def watched(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    monkeypatch.setattr(pods_module, "_RETRY_S", 0.01)
    api.pods = {"a": pod("a", "10.0.0.1"), "b": pod("b")}
    made = watched_pods(api, tmp_path)
    await made.source.start(made.changed.set)
    yield made
    api.status, api.page = 200, b""
    await made.source.close()
    assert api.requests[-1] == "delete "


async def test_changes_are_read_from_one_watch_and_not_from_lists(watched: Watched, api: Api) -> None:
    found = await watched.until(lambda found: len(found) == 2)
    assert found == [FoundRunner("a", ("10.0.0.1", 7070)), FoundRunner("b", None)]
    api.send("MODIFIED", pod("b", "10.0.0.2"))
    api.send("ADDED", pod("c"))
    api.send("DELETED", pod("a", "10.0.0.1"))
    found = await watched.until(lambda found: [one.name for one in found] == ["b", "c"])
    assert found[0].address == ("10.0.0.2", 7070)
    for _ in range(100):
        await watched.source.list()
    assert api.requests == ["list", "watch from 7"]


@pytest.mark.parametrize("kind", ["MODIFIED", "DELETED"])
async def test_a_pod_that_was_killed_for_lack_of_memory_is_known_after_its_removal(
    watched: Watched, api: Api, kind: str
) -> None:
    """Its connection may end before the news comes. A pod that ended for another reason did not lack memory."""
    await watched.until(lambda found: len(found) == 2)
    asked = [asyncio.create_task(watched.source.lacked_memory(FoundRunner(name, None))) for name in ("a", "b")]
    await asyncio.sleep(0)
    assert not any(one.done() for one in asked)
    api.send(kind, ended("a", "OOMKilled"))
    api.send(kind, ended("b", "Error"))
    await watched.until(lambda found: not found)
    assert await asyncio.gather(*asked) == [True, False]
    assert await watched.source.lacked_memory(FoundRunner("a", None))


async def test_a_pod_that_goes_on_did_not_lack_memory(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    await watched.until(lambda found: len(found) == 2)
    monkeypatch.setattr(pods_module, "_NEWS_LIMIT_S", 0.01)
    assert not await watched.source.lacked_memory(FoundRunner("a", None))


async def test_a_removed_pod_is_not_listed_again_though_the_api_still_reports_it(watched: Watched, api: Api) -> None:
    """The last part of the invariant of kubernetes_pods.py: events and lists may be older than the removal."""
    (a, _) = await watched.until(lambda found: len(found) == 2)
    await watched.source.remove(a)
    api.send("MODIFIED", pod("a", "10.0.0.1"))
    api.send("ADDED", pod("c"))
    assert [one.name for one in await watched.until(lambda found: len(found) == 2)] == ["b", "c"]
    api.end_watch()
    api.pods["d"] = pod("d")
    found = await watched.until(lambda found: any(one.name == "d" for one in found))
    assert "a" not in [one.name for one in found]


async def test_a_created_pod_is_listed_before_the_watch_reports_it(watched: Watched) -> None:
    await watched.until(lambda found: len(found) == 2)
    name = await watched.source.create()
    assert FoundRunner(str(name), None) in await watched.source.list()


async def test_a_created_pod_has_the_lease_of_its_gateway_as_controller(watched: Watched, api: Api) -> None:
    """`kubectl drain` refuses a pod without a controller, and Kubernetes deletes the pods of a deleted Lease."""
    await watched.source.create()
    (owner,) = api.made[0]["metadata"]["ownerReferences"]
    ((name, lease),) = api.leases.items()
    assert (owner["kind"], owner["name"], owner["controller"]) == ("Lease", name, True)
    assert owner["uid"] == lease["metadata"]["uid"]
    assert api.made[0]["metadata"]["labels"] == lease["metadata"]["labels"] == {"nouscoder.io/pool": name}


async def test_a_closed_source_leaves_no_lease(api: Api, tmp_path: Path) -> None:
    made = watched_pods(api, tmp_path)
    await made.source.start(made.changed.set)
    await made.source.create()
    assert len(api.leases) == 1
    api.end_watch()
    await made.source.close()
    assert api.leases == {}


def lease_of(api: Api, name: str) -> GatewayLease:
    configuration = client.Configuration(host=api.url)
    return GatewayLease(client.CoordinationV1Api(client.ApiClient(configuration)), "default", name)


def test_only_the_lease_of_a_gateway_that_is_gone_is_removed(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(kubernetes_pods, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    ours, living, gone = (lease_of(api, name) for name in ("ours", "living", "gone"))
    for lease in (ours, living, gone):
        lease.renew()
    for _ in range(LEASE_S // 10 + 1):
        assert ours.sweep() == []
        clock[0] += 10
        living.renew()
    assert ours.sweep() == ["gone"]
    assert set(api.leases) == {"ours", "living"}, "one that never renews its own is not removed by itself"
    assert ours.sweep() == []


def test_a_restarted_gateway_takes_over_its_lease_and_a_removed_one_is_made_again(api: Api) -> None:
    first = lease_of(api, "same").owner()
    again = lease_of(api, "same")
    assert again.owner() == first
    del api.leases["same"]
    again.renew()
    assert again.owner()["uid"] == api.leases["same"]["metadata"]["uid"] != first["uid"]


async def test_a_namespace_that_does_not_exist_is_reported(watched: Watched, api: Api) -> None:
    await watched.until(lambda found: len(found) == 2)
    await watched.source.create()
    api.status = 404
    with pytest.raises(RunnersUnreachable, match="404"):
        await watched.source.create()


async def test_an_ended_pod_is_removed_and_a_terminating_one_is_not_listed(watched: Watched, api: Api) -> None:
    await watched.until(lambda found: len(found) == 2)
    api.send("MODIFIED", pod("a", "10.0.0.1", phase="Failed"))
    api.send("MODIFIED", pod("b", "10.0.0.2", deletionTimestamp="2026-01-01T00:00:00Z"))
    assert await watched.until(lambda found: not found) == []
    assert "delete /a" in api.requests


async def test_a_refusing_api_is_reported_and_read_again_when_it_answers(watched: Watched, api: Api) -> None:
    await watched.until(lambda found: len(found) == 2)
    api.status = 503
    api.end_watch()
    with pytest.raises(RunnersUnreachable, match="503"):
        await watched.until(lambda _: False)
    api.status, api.pods = 200, {"e": pod("e", "10.0.0.5")}
    watched.ignores_faults = True
    found = await watched.until(lambda found: [one.name for one in found] == ["e"])
    assert found == [FoundRunner("e", ("10.0.0.5", 7070))]


async def test_the_reason_of_a_refused_pod_is_reported(watched: Watched, api: Api) -> None:
    """The policies of a cluster answer with it."""
    await watched.until(lambda found: len(found) == 2)
    await watched.source.create()
    api.status, api.refusal = 403, "the policy wants another image"
    with pytest.raises(RunnersUnreachable, match="the policy wants another image"):
        await watched.source.create()


def test_a_pod_has_no_address_before_it_is_ready() -> None:
    starting = pod("a") | {"status": {"phase": "Pending", "podIP": "10.0.0.1"}}
    assert read_pod(starting) == RunnerPod("a")
    assert read_pod(pod("a", "10.0.0.1")) == RunnerPod("a", "10.0.0.1")
    assert read_pod(pod("a", phase="Failed", deletionTimestamp="now")) == RunnerPod("a", "", True, True)
    assert read_pod(ended("a", "OOMKilled")) == RunnerPod("a", "", True, lacked_memory=True)
    assert read_pod(ended("a", "Error")) == RunnerPod("a", "", True)


@pytest.mark.parametrize("text", [b"<html>", b"[]", b"{}", b'{"items": [1], "metadata": {}}', b'{"items": 1}'])
def test_an_answer_that_is_no_list_of_pods_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"pod|Expecting"):
        read_pods(text)


async def test_a_page_of_a_proxy_in_place_of_a_pod_is_reported(watched: Watched, api: Api) -> None:
    await watched.until(lambda found: len(found) == 2)
    await watched.source.create()
    api.page = b"<html>sign in</html>"
    with pytest.raises(RunnersUnreachable, match="cannot be read"):
        await watched.source.create()
