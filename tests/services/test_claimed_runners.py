"""Runners of agent-sandbox over HTTP with a small Kubernetes API: SandboxClaims, their pods, what may be missing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="install the `cluster` extra")
from kubernetes import client
from tests.services.test_runner_pods import Api, Watched, ended

from nouscoder.config import SandboxSection
from nouscoder.verifier.sandbox import SandboxUnavailable
from nouscoder.verifier.sandbox.runners import kubernetes_pods as pods_module
from nouscoder.verifier.sandbox.runners.kubernetes_pods import ManagedPods
from nouscoder.verifier.sandbox.runners.link import PoolKeys
from nouscoder.verifier.sandbox.runners.pods import open_source
from nouscoder.verifier.sandbox.runners.pool import FoundRunner, RunnersUnreachable
from nouscoder.verifier.sandbox.runners.sandbox_claims import ClaimedSandboxes, read_claim

PATH = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/default/sandboxclaims"
SPEC = {"warmPoolRef": {"name": "runners"}}
POD_OF_A = "/api/v1/namespaces/default/pods/sandbox-of-a"


def claim(name: str, ip: str = "", reason: str = "SandboxNotReady", finished: str = "") -> dict[str, Any]:
    """A SandboxClaim as its controller leaves it. It is ready when it has an address."""
    conditions = [{"type": "Ready", "status": "True" if ip and not finished else "False", "reason": reason}]
    if finished:
        conditions.append({"type": "Finished", "status": "True", "reason": finished})
    sandbox = {"name": f"sandbox-of-{name}"} | ({"podIPs": [ip]} if ip else {})
    metadata = {"name": name, "resourceVersion": "8"}
    return {"kind": "SandboxClaim", "metadata": metadata, "status": {"conditions": conditions, "sandbox": sandbox}}


def template_in(folder: Path) -> Path:
    made = folder / "claim.json"
    body = {"apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim", "spec": SPEC}
    made.write_text(json.dumps(body | {"metadata": {"generateName": "runner-"}}))
    return made


@pytest.fixture
def api() -> Any:
    made = Api(PATH)
    yield made
    made.close()


@pytest.fixture
async def watched(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    monkeypatch.setattr(pods_module, "_RETRY_S", 0.01)
    api.pods = {"a": claim("a", "10.0.0.1"), "b": claim("b")}
    core = client.CoreV1Api(client.ApiClient(client.Configuration(host=api.url)))
    made = Watched(ClaimedSandboxes(template_in(tmp_path), 7070, core))
    await made.source.start(made.changed.set)
    yield made
    api.status = 200
    await made.source.close()


async def test_a_claim_is_a_runner_with_the_address_of_its_pod(watched: Watched, api: Api) -> None:
    found = await watched.until(lambda found: len(found) == 2)
    assert found[0] == FoundRunner("a", ("10.0.0.1", 7070))
    assert found[1].address is None
    api.send("MODIFIED", claim("b", "10.0.0.2"))
    found = await watched.until(lambda found: found[1].address is not None)
    assert found[1] == FoundRunner("b", ("10.0.0.2", 7070))
    assert api.requests == ["list", "watch from 7"]


async def test_a_made_claim_names_its_pool_and_belongs_to_the_lease_of_its_gateway(watched: Watched, api: Api) -> None:
    name = await watched.source.create()
    (made,) = api.made
    assert (made["kind"], made["spec"]) == ("SandboxClaim", SPEC)
    ((lease, _),) = api.leases.items()
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], made["metadata"]["labels"]) == ("Lease", lease, {"nouscoder.io/pool": lease})
    assert name in [one.name for one in await watched.source.list()]


@pytest.mark.parametrize("now", ["", "10.0.0.9"], ids=["no-pod", "another-pod"])
async def test_a_claim_whose_pod_was_deleted_is_deleted_so_that_its_runner_is_replaced(
    watched: Watched, api: Api, now: str
) -> None:
    """The controller makes another pod for the claim, which no gateway has tested."""
    await watched.until(lambda found: len(found) == 2)
    api.send("MODIFIED", claim("a", now))
    assert [one.name for one in await watched.until(lambda found: len(found) == 1)] == ["b"]
    assert "delete /a" in api.requests


async def test_a_claim_whose_pod_is_not_ready_for_a_while_stays(watched: Watched, api: Api) -> None:
    await watched.until(lambda found: len(found) == 2)
    unready = claim("a", "10.0.0.1")
    unready["status"]["conditions"][0]["status"] = "False"
    api.send("MODIFIED", unready)
    api.send("MODIFIED", claim("b", "10.0.0.2"))
    found = await watched.until(lambda found: found[-1].address is not None)
    assert found[0] == FoundRunner("a", ("10.0.0.1", 7070))


@pytest.mark.parametrize(("reason", "lacked"), [("OOMKilled", True), ("Error", False)])
async def test_what_killed_the_pod_of_a_claim_is_known_after_its_removal(
    watched: Watched, api: Api, reason: str, lacked: bool
) -> None:
    await watched.until(lambda found: len(found) == 2)
    api.others[POD_OF_A] = ended("sandbox-of-a", reason)
    api.send("MODIFIED", claim("a", "10.0.0.1", finished="PodFailed"))
    await watched.until(lambda found: [one.name for one in found] == ["b"])
    assert await watched.source.lacked_memory(FoundRunner("a", None)) is lacked
    assert "delete /a" in api.requests


async def test_an_ended_pod_that_is_gone_lacked_no_memory_as_far_as_known(watched: Watched, api: Api) -> None:
    await watched.until(lambda found: len(found) == 2)
    api.send("MODIFIED", claim("a", finished="PodSucceeded"))
    await watched.until(lambda found: [one.name for one in found] == ["b"])
    assert not await watched.source.lacked_memory(FoundRunner("a", None))


async def test_what_a_claim_waits_for_is_said(watched: Watched, api: Api) -> None:
    refused = claim("b", reason="WarmPoolNotFound")
    refused["status"]["conditions"][0]["message"] = 'SandboxWarmPool "runners" not found'
    api.send("MODIFIED", refused)
    found = await watched.until(lambda found: "not found" in found[-1].waits_for)
    assert found[-1].waits_for == 'WarmPoolNotFound: SandboxWarmPool "runners" not found'
    runner, *_ = read_claim({"metadata": {"name": "new"}})
    assert "the controller of agent-sandbox has not seen" in runner.waits_for


async def test_a_cluster_without_agent_sandbox_is_reported(watched: Watched, api: Api) -> None:
    await watched.until(lambda found: len(found) == 2)
    api.status = 404
    api.end_watch()
    with pytest.raises(RunnersUnreachable, match=r"no sandboxclaims.*/v1beta1: install agent"):
        await watched.until(lambda _: False)


async def test_only_the_newest_quarantined_claims_are_kept(watched: Watched, api: Api) -> None:
    await watched.until(lambda found: len(found) == 2)
    api.pods = {str(day): claim(str(day)) for day in range(1, 6)}
    for day, one in api.pods.items():
        one["metadata"]["creationTimestamp"] = f"2026-11-0{day}T00:00:00Z"
    await watched.source.quarantine(FoundRunner("5", None))
    assert api.patched == [("5", {"metadata": {"labels": {"nouscoder.io/quarantined": "true"}}})]
    assert [one for one in api.requests if one.startswith("delete")] == ["delete /1", "delete /2"]


async def test_a_closed_gateway_gives_its_claims_back_with_its_lease(api: Api, tmp_path: Path) -> None:
    core = client.CoreV1Api(client.ApiClient(client.Configuration(host=api.url)))
    made = Watched(ClaimedSandboxes(template_in(tmp_path), 7070, core))
    await made.source.start(made.changed.set)
    await made.source.create()
    assert len(api.leases) == 1
    api.end_watch()
    await made.source.close()
    assert api.leases == {}
    assert not [one for one in api.requests if one.startswith("delete")], "the right to delete all claims is not needed"


@pytest.mark.parametrize(("kind", "source"), [("SandboxClaim", ClaimedSandboxes), ("Pod", ManagedPods)])
async def test_the_kind_of_the_template_decides_where_runners_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, source: type[ManagedPods]
) -> None:
    core = client.CoreV1Api(client.ApiClient(client.Configuration(host="http://127.0.0.1:9")))
    monkeypatch.setattr(pods_module, "_open_api", lambda: core)
    template = template_in(tmp_path)
    template.write_text(json.dumps(json.loads(template.read_text()) | {"kind": kind}))
    section = SandboxSection(backend="gvisor", pool_template=str(template))
    assert type(open_source(section, PoolKeys(b"key"))) is source


def test_a_template_of_another_kind_is_refused(tmp_path: Path) -> None:
    template = tmp_path / "job.json"
    template.write_text(json.dumps({"kind": "Job", "metadata": {"generateName": "runner-"}}))
    with pytest.raises(SandboxUnavailable, match="not a Pod or a SandboxClaim"):
        open_source(SandboxSection(backend="gvisor", pool_template=str(template)), PoolKeys(b"key"))


@pytest.mark.parametrize("record", [{}, [], {"metadata": {}}, {"metadata": {"name": "a"}, "status": {"conditions": 1}}])
def test_a_record_that_is_no_claim_is_a_value_error(record: Any) -> None:
    with pytest.raises(ValueError, match="no pod or claim"):
        read_claim(record)
