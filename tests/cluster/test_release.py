"""`helm install` with the default values, until after the end of the run. Processes in a runner pod reach no peer: a
candidate has no network, and network policies stop a process that has escaped into the pod. The same peers answer
allowed clients. The tests of this file use one release, in order.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import pytest
from tests.cluster.conftest import ROOT
from tests.cluster.reach import NAMES, Places, places_of, program, said_inside
from tests.cluster.rules import wait_for_data

from nouscoder.client import AsyncClient

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2700)]

COMPONENTS = {"redis", "broker", "verifier", "sandbox", "generation", "learner"}
POOL = {"verifier", "sandbox"}  # a gateway and its runners
KEPT = {"persistentvolumeclaim/nouscoder-runs", "persistentvolumeclaim/nouscoder-redis", "pod/nouscoder-test"}
KINDS = (
    "all,configmaps,secrets,persistentvolumeclaims,roles,rolebindings,serviceaccounts,networkpolicies,"
    "poddisruptionbudgets"
)
READY_LIMIT_S = 900.0  # the warm start took 150 to 400 s
RUN_LIMIT_S = 2100.0
ROLLOUT_LIMIT_S = 420.0


class Release(Protocol):
    """See conftest.py."""

    namespace: str

    @property
    def runners(self) -> str: ...

    def helm(self, *words: str, limit_s: float = 300) -> str: ...
    def kubectl(self, *words: str, limit_s: float = 60) -> str: ...
    def install(self, *words: str) -> None: ...
    def pods(self) -> list[Any]: ...
    def pod(self, component: str) -> Any: ...
    def secret(self, name: str, key: str) -> str: ...
    def forward(self, what: str, port: int) -> Any: ...
    def until(self, condition: Any, what: str, limit_s: float, every_s: float = 2.0) -> Any: ...
    def all_ready(self, wanted: set[str]) -> bool: ...
    def status(self) -> dict[str, Any]: ...
    def step(self) -> int: ...
    def run_file(self, name: str) -> str: ...


def goes_on(release: Release, num_steps: int, limit_s: float) -> int:
    """Wait until that many more batches are committed. The ledger must balance at every check."""
    start = max(release.step(), 0)

    def far_enough() -> bool:
        status = release.status()
        if status:
            assert status["balanced"], status["ledger"]
        return int(status.get("batches_committed", -1)) >= start + num_steps

    release.until(far_enough, f"{num_steps} batches more than {start}", limit_s)
    return start


def test_every_pod_becomes_ready(release: Release) -> None:
    started = time.monotonic()
    release.install()
    release.until(lambda: release.all_ready(COMPONENTS), "every pod is ready", READY_LIMIT_S)
    print(f"every pod ready after {time.monotonic() - started:.0f} s")
    assert {pod.component for pod in release.pods()} >= COMPONENTS


def test_the_run_continues_during_an_upgrade_and_a_rollback(release: Release) -> None:
    goes_on(release, 4, 600)
    before = {pod.component: pod.uid for pod in release.pods()}
    # Every service reads this value.
    release.helm(
        "upgrade", "nouscoder", "helm/nouscoder", "--reset-then-reuse-values", "--set", "config.broker.max_staleness=5"
    )
    release.until(lambda: _renewed(release, before), "every service has a new pod", ROLLOUT_LIMIT_S)
    first = goes_on(release, 2, ROLLOUT_LIMIT_S)
    release.helm("rollback", "nouscoder", "1")
    release.until(lambda: release.all_ready(COMPONENTS), "every pod is ready again", ROLLOUT_LIMIT_S)
    second = goes_on(release, 2, ROLLOUT_LIMIT_S)
    print(f"upgraded at batch {first}, rolled back at batch {second}")
    assert second >= first + 2  # no batch was lost


def test_an_upgrade_that_the_run_would_refuse_changes_nothing(release: Release, tmp_path: Path) -> None:
    """The doctor says it too, and lets other images pass, whose runners the policy of this release refuses."""
    pods, began = {pod.uid for pod in release.pods()}, time.monotonic()
    history, where = json.loads(release.helm("history", "nouscoder", "-o", "json")), ("-n", release.namespace)
    upgrade = ("helm", "upgrade", "nouscoder", "helm/nouscoder", *where, "--reset-then-reuse-values")
    doctor = (sys.executable, "-m", "nouscoder", "doctor", "--cluster", *where, "--values")
    file = tmp_path / "values.yaml"
    for key, value, was in (
        ("broker.group_size", "16", "8"),
        ("policy.path", "/runs/other", "policy"),
        ("run.seed", "7", "0"),
    ):
        done = subprocess.run([*upgrade, "--set", f"config.{key}={value}"], capture_output=True, text=True, timeout=120)
        said = done.stderr.replace('"', "")
        assert done.returncode
        assert f"config.{key} is {value}, but it was {was} when the run demo began" in said
        assert "put it back, or begin another run with config.run.name" in said
    for values, code, verdict in (
        ("{image: {tag: 2.0.0}}", 0, "can run here"),
        ("{global: {imageRegistry: registry.example.org}}", 0, "can run here"),
        ("{config: {broker: {group_size: 16}}}", 1, "cannot run: values in this cluster"),
    ):
        file.write_text(values)
        done = subprocess.run([*doctor, str(file)], capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stdout
        assert done.stdout.rstrip().endswith(verdict)
        assert not code or "config.broker.group_size is 16, but it was 8" in done.stdout
    assert json.loads(release.helm("history", "nouscoder", "-o", "json")) == history
    print(f"three upgrades refused and three values examined in {time.monotonic() - began:.0f} s")
    goes_on(release, 1, ROLLOUT_LIMIT_S)
    assert {pod.uid for pod in release.pods() if pod.component != "sandbox"} <= pods


def _renewed(release: Release, before: dict[str, str]) -> bool:
    now = {pod.component: pod.uid for pod in release.pods() if pod.component != "test"}
    services = ("broker", "verifier", "generation", "learner")
    return release.all_ready(COMPONENTS) and all(now.get(name) != before[name] for name in services)


def test_no_dashboard_panel_is_empty(release: Release) -> None:
    command = [sys.executable, "deploy/check-dashboards", "--namespace", release.namespace, "--release", "nouscoder"]
    done = release.until(lambda: _finished(command), "every panel has data", 300, every_s=10)
    print(done.stdout[-500:])


def test_no_rule_is_without_data(release: Release) -> None:
    """deploy/dashboards/rules.py lists the rules that have none in this release."""
    wait_for_data(release)


def _finished(command: list[str]) -> subprocess.CompletedProcess[str] | None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-500:])
    return done if done.returncode == 0 else None


def test_a_larger_pool_restarts_no_pod_of_another_component(release: Release) -> None:
    before, pool = _others(release), {pod.uid for pod in release.pods() if pod.component in POOL}
    began = time.monotonic()
    release.helm(
        "upgrade", "nouscoder", "helm/nouscoder", "--reset-then-reuse-values", "--set", "verifier.sandbox.pool.size=3"
    )

    def has_grown() -> bool:
        pods = [pod for pod in release.pods() if pod.component in POOL]
        new = [pod.component for pod in pods if pod.ready and pod.uid not in pool]
        gateways = [pod for pod in pods if pod.component == "verifier"]
        return len(gateways) == 1 and "verifier" in new and new.count("sandbox") >= 3 + 1  # with the spare

    release.until(has_grown, "a new verifier with its runners", ROLLOUT_LIMIT_S)
    grown_s = time.monotonic() - began
    goes_on(release, 1, ROLLOUT_LIMIT_S)  # a pod that restarts drains first: time in which that would show
    assert _others(release) == before
    print(f"a pool of 3 after {grown_s:.0f} s; not restarted: {', '.join(sorted(name for name, _ in before.values()))}")


def _others(release: Release) -> dict[str, tuple[str, int]]:
    """UID -> name and restarts of the pods that have nothing to do with the pool."""
    pods = [pod for pod in release.pods() if pod.component in COMPONENTS - POOL]
    assert {pod.component for pod in pods} == COMPONENTS - POOL
    return {pod.uid: (pod.name, pod.num_restarts) for pod in pods}


def test_the_run_learns_and_completes(release: Release) -> None:
    summary = json.loads(
        release.until(lambda: release.run_file("summary.json"), "the run ends", RUN_LIMIT_S, every_s=5)
    )
    print(summary)
    assert summary["balanced"]
    assert summary["steps"] == 160
    assert summary["pass_at_1_after"] >= summary["pass_at_1_before"] + 0.2
    status = release.status()
    assert status["finished"]
    assert status["balanced"]
    steps = [json.loads(line)["step"] for line in release.run_file("metrics.jsonl").splitlines()]
    assert steps == sorted(set(steps))
    # The verifier replaces runner pods now and then, so one may be starting now. No service may be restarting.
    services = [pod for pod in release.pods() if pod.component in COMPONENTS - {"sandbox"}]
    assert [pod.component for pod in services if not pod.ready] == []
    release.until(lambda: release.all_ready(COMPONENTS), "every runner pod is ready", 120)


@pytest.fixture(scope="module")
def places(release: Release) -> Places:
    """The peers in this cluster, after the run has ended."""
    return places_of(release)


async def test_a_candidate_has_no_network(release: Release, places: Places) -> None:
    token = release.secret("nouscoder-verifier-tokens", "token")
    with release.forward("svc/nouscoder-verifier", 8080) as port:
        async with AsyncClient(f"http://127.0.0.1:{port}", token=token) as client:
            answer = await client.grade(
                code=program(places.all, NAMES),
                tests={"type": "stdin", "cases": [{"input": "", "output": "reached []"}]},
                limits={"wall_time_s": 60, "cpu_time_s": 30, "memory_bytes": 256 << 20},
            )
    assert answer["verdict"] == "accepted", answer
    assert answer["backend"] == "gvisor"
    print(f"{len(places.all)} places, {len(NAMES)} names: none reached by a candidate")


def test_a_process_in_the_pods_network_namespace_reaches_no_peer(release: Release, places: Places) -> None:
    """Candidates are not in the runner's network namespace. Inside it, only the NetworkPolicy protects."""
    pod = release.pod("sandbox")
    own = json.loads(release.kubectl("get", "pod", pod.name, "-n", pod.namespace, "-o", "json"))["status"]["podIP"]
    others = [place for place in places.all if place[0] != own]
    said = said_inside(pod, "runner", program(others, NAMES))
    assert said == "reached []"


def test_the_same_peers_answer_allowed_clients(release: Release, places: Places) -> None:
    """Shows that the two tests above could have reached the peers without the policy."""
    pod = release.pod("verifier")
    said = said_inside(pod, "verifier", program(places.of_verifier, NAMES[:1]))
    wanted = [*map(list, places.of_verifier), [NAMES[0], 80, "name"]]
    assert said == f"reached {wanted}"


def test_other_pods_reach_neither_runners_nor_redis(release: Release, places: Places) -> None:
    """Tests from the generation pod, which needs neither of them."""
    closed = [place for place in places.all if place[1] in (7070, 6379)]
    assert len(closed) >= 3
    assert said_inside(release.pod("generation"), "generation", program(closed, [])) == "reached []"


def test_helm_test_passes(release: Release) -> None:
    said = release.helm("test", "nouscoder", "--logs")
    print(said[-1500:])
    assert "Succeeded" in said


def test_a_reader_with_the_documented_role_follows_the_run_from_outside(release: Release, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "operating.md").read_text(encoding="utf8")
    role = re.search(r"```yaml\n([^`]*name: nouscoder-reader[^`]*)```", text)
    assert role is not None
    (tmp_path / "role.yaml").write_text(role[1].replace("namespace: nouscoder}", f"namespace: {release.namespace}}}"))
    release.kubectl("create", "-f", str(tmp_path / "role.yaml"))
    release.kubectl("create", "serviceaccount", "reader")
    account = f"--serviceaccount={release.namespace}:reader"
    release.kubectl("create", "rolebinding", "nouscoder-reader", "--role=nouscoder-reader", account)
    tree = json.loads(release.kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    tree["users"][0]["user"] = {"token": release.kubectl("create", "token", "reader").strip()}
    tree["contexts"][0]["context"]["namespace"] = release.namespace
    (tmp_path / "kubeconfig").write_text(json.dumps(tree))
    environment = {**os.environ, "KUBECONFIG": str(tmp_path / "kubeconfig")}

    def nouscoder(*words: str) -> str:
        command = [sys.executable, "-m", "nouscoder", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout

    assert json.loads(nouscoder("status", "--cluster", "--json"))["balanced"]
    assert "the run is finished" in nouscoder("why-stalled", "--cluster")
    assert {"broker", "generation", "learner", "run", "verifier"} <= {
        json.loads(line)["service"] for line in nouscoder("logs", "--cluster", "--tail", "3", "--json").splitlines()
    }


def test_uninstall_leaves_the_documented_objects(release: Release) -> None:
    release.helm("uninstall", "nouscoder", "--wait", "--timeout", "3m")
    selector = "app.kubernetes.io/instance=nouscoder"

    def left() -> set[str]:
        return set(release.kubectl("get", KINDS, "-l", selector, "-o", "name").split())

    release.until(lambda: left() <= KEPT, "everything else is gone", 120)
    assert left() == KEPT
    wide = "namespaces,validatingadmissionpolicies,validatingadmissionpolicybindings"

    def left_over() -> bool:
        return f"/{release.runners}" in release.kubectl("get", wide, "-o", "name")

    release.until(lambda: not left_over(), "the namespace of the runners is gone", 120)
