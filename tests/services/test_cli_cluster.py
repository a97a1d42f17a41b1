"""`--cluster` of status, why-stalled and the other commands at a broker, `logs` and `pages`, at an API server."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import AsyncExitStack
from http.client import RemoteDisconnected
from pathlib import Path
from typing import Any

import pytest
from tests import command_line
from tests.certificates import make_certificate
from tests.fake_cluster import FakeCluster, made, not_ready, pod, serving, warning, write_kubeconfig

from nouscoder.broker.process import serve_broker
from nouscoder.errors import ExitCode
from nouscoder.run.pages import open_pages

BROKER, PAGES = ("grpc", 50052), ("pages", 8090)
Use = Callable[[FakeCluster], Any]


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(file))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
    monkeypatch.chdir(tmp_path)
    return file


def release(**more: Any) -> FakeCluster:
    """A release whose pods are all ready."""
    learner = pod("learner", PAGES, container="run")
    cluster = FakeCluster(
        pods=[pod("broker", BROKER), learner, pod("generation")],
        deployments=[made("broker"), made("generation")],
        statefulsets=[made("learner")],
    )
    for name, value in more.items():
        setattr(cluster, name, value)
    return cluster


async def run(*words: str) -> command_line.Ended:
    return await asyncio.to_thread(command_line.nouscoder, *words)


async def test_the_answers_of_a_broker_in_a_cluster_are_those_of_one_nearby(broker_rig: Any, kubeconfig: Path) -> None:
    """Also while the learner is Pending: its pod is named, in the answer for a person and beside that for a program."""
    config = broker_rig.config("broker.grpc=127.0.0.1:0")
    cluster = release()
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU is free"}
    cluster.pods[1] = pod("learner", PAGES, **not_ready(conditions=[unschedulable]))
    said = "pod mine-learner-7 is Pending: Unschedulable: no GPU is free\n"
    async with AsyncExitStack() as stack:
        address = await serve_broker(broker_rig.broker(config), config, asyncio.Event(), stack)
        cluster.places[50052] = int(address.rpartition(":")[2])
        stack.enter_context(serving(cluster, kubeconfig))
        for command in ("status", "why-stalled"):
            near = await run(command, "--broker", address)
            assert await run(command, "--cluster") == command_line.Ended(0, near.stdout + said, "")
            near, far = [await run(command, *place, "--json") for place in (("--broker", address), ("--cluster",))]
            assert (far.exit_code, json.loads(far.stdout), far.stderr) == (0, json.loads(near.stdout), said)
        assert await run("pause", "--cluster") == command_line.Ended(0, f"the run is paused\n{said}", "")


async def test_a_broker_with_tls_is_asked_with_the_certificate_of_its_pod_by_those_who_may_read_it(
    broker_rig: Any, kubeconfig: Path, tmp_path: Path
) -> None:
    names = ("tls.crt", "tls.key", "ca.crt")
    folder = make_certificate(tmp_path, "DNS:mine-broker.team.svc")
    pair = f'certificate="{folder}/tls.crt", key="{folder}/tls.key"'
    tls = (f'tls={{{pair}, ca="{folder}/ca.crt"}}', f"verifier.tls={{{pair}}}")
    config = broker_rig.config("broker.grpc=127.0.0.1:0", *tls)
    cluster = release()
    mounted = {"name": "certificate", "items": [{"key": name, "path": f"tls/{name}"} for name in names]}
    cluster.pods[0]["spec"]["volumes"] = [{"name": "tmp"}, {"projected": {"sources": [{"secret": mounted}]}}]
    content = {name: base64.b64encode((folder / name).read_bytes()).decode() for name in names}
    cluster.secrets["certificate"] = {"data": content}
    async with AsyncExitStack() as stack:
        address = await serve_broker(broker_rig.broker(config), config, asyncio.Event(), stack)
        cluster.places[50052] = int(address.rpartition(":")[2])
        stack.enter_context(serving(cluster, kubeconfig))
        done = await run("status", "--cluster", "--json")
        assert (done.exit_code, json.loads(done.stdout)["balanced"], done.stderr) == (0, True, "")
        cluster.refused["secrets"] = 403
        said = "this account may not get secret certificate in namespace team, which the broker's TLS needs"
        assert await run("why-stalled", "--cluster") == command_line.Ended(78, "", f"nouscoder: {said}\n")
        cluster.refused.clear()
        del content["tls.key"]
        lacking = await run("status", "--cluster")
        assert (lacking.exit_code, lacking.stdout, lacking.stderr.count("\n")) == (ExitCode.UNAVAILABLE, "", 1)
        assert "secret certificate in namespace team has no tls.key" in lacking.stderr


def waiting(container: str, reason: str, message: str) -> dict[str, Any]:
    return {"name": container, "state": {"waiting": {"reason": reason, "message": message}}}


def ended(container: str, code: int, reason: str, message: str = "") -> dict[str, Any]:
    terminated = {"exitCode": code, "reason": reason, "message": message}
    back_off = waiting(container, "CrashLoopBackOff", "back-off 5m0s restarting failed container")
    return back_off | {"lastState": {"terminated": terminated}}


async def test_a_broker_that_does_not_answer_is_not_taken_for_a_run_of_this_machine(
    kubeconfig: Path, tmp_path: Path
) -> None:
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "run" / "config.toml").write_text('[run]\nname = "run"\n')
    cluster = release()
    cluster.pods[2] = pod("generation", **not_ready(waiting("generation", "ErrImagePull", "no such tag")))
    with serving(cluster, kubeconfig):
        done = await run("status", "--cluster")
    assert (done.exit_code, done.stdout) == (ExitCode.UNAVAILABLE, "")
    assert done.stderr == (
        "nouscoder: broker of release mine in namespace team has not answered for 3 s; connect to port 50052:"
        " connection refused; pod mine-generation-7 is not ready: its container generation waits: ErrImagePull: no such"
        " tag\n"
    )


def is_suspended(cluster: FakeCluster) -> None:
    cluster.pods = []
    for one in (*cluster.deployments, *cluster.statefulsets):
        one["spec"]["replicas"] = 0


def has_no_quota(cluster: FakeCluster) -> None:
    del cluster.pods[0]
    old = warning("mine-broker-5f", "FailedCreate", "an older one", at="2026-11-29T08:00:00Z")
    cluster.events = [warning("mine-broker-5f", "FailedCreate", "exceeded quota: gpus"), old]
    cluster.events.append(warning("mine-broker-canary-5f", "FailedCreate", "of another"))


def breaks(component: str, **status: Any) -> Callable[[FakeCluster], None]:
    def change(cluster: FakeCluster) -> None:
        cluster.pods[0] = pod(component, BROKER, **status)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (is_suspended, "broker is scaled to 0 pods; generation is scaled to 0 pods; learner is scaled to 0 pods"),
        (has_no_quota, "broker has 0 of 1 pods: FailedCreate: exceeded quota: gpus"),
        (
            breaks("broker", **not_ready(ended("broker", 78, "Error"))),
            "pod mine-broker-7 is not ready: its container broker ended with exit code 78 (Error): nouscoder: no Redis",
        ),
        (
            breaks("broker", **not_ready(ended("broker", 137, "OOMKilled", "killed"))),
            "pod mine-broker-7 is not ready: its container broker ended with exit code 137 (OOMKilled): killed",
        ),
        (
            breaks("broker", phase="Failed", reason="Evicted", message="the node is short of memory"),
            "pod mine-broker-7 is Failed, not ready: Evicted: the node is short of memory;"
            " broker has 0 of 1 pods: FailedMount: no volume",
        ),
        (
            breaks("broker", **not_ready(waiting("broker", "ContainerCreating", ""))),
            "pod mine-broker-7 is Pending, not ready: FailedMount: no volume",
        ),
        (
            breaks("broker", phase="Pending", initContainerStatuses=[
                {"name": "problems", "ready": False, "state": {"running": {}}},
            ]),
            "pod mine-broker-7 is Pending, not ready: FailedMount: no volume",
        ),
    ],
)  # fmt: skip
def test_without_a_broker_the_command_says_why(
    change: Callable[[FakeCluster], None], said: str, kubeconfig: Path
) -> None:
    previous = {("mine-broker-7", "broker", "previous"): "start\nnouscoder: no Redis\n"}
    cluster = release(logs=previous, events=[warning("mine-broker-7", "FailedMount", "no volume")])
    change(cluster)
    with serving(cluster, kubeconfig):
        done = command_line.nouscoder("status", "--cluster")
    expected = f"nouscoder: release mine in namespace team has no running container broker: {said}\n"
    assert (done.exit_code, done.stderr) == (ExitCode.UNAVAILABLE, expected)


@pytest.mark.parametrize(
    ("words", "refused", "code", "said"),
    [
        ("status", {"pods": 403}, 78, "this account may not list pods in namespace team"),
        ("status", {"deployments": 403}, 78, "this account may not list deployments in namespace team"),
        ("status", {"pods/portforward": 403}, 78, "may not get and create pods/portforward in namespace team"),
        ("pages", {"pods/portforward": 403}, 78, "may not get and create pods/portforward in namespace team"),
        ("logs", {"pods/log": 403}, 78, "this account may not get pods/log in namespace team"),
        ("logs", {"events": 403}, 78, "this account may not list events in namespace team"),
        ("pages", {"pods": 401}, 78, "the API server does not take this login (401): log in again"),
        ("pages", {"pods": 502}, 69, "cannot list pods in namespace team: 502 "),
        ("status -n other", {}, 78, "no release of nouscoder in namespace other: name another namespace with -n"),
        ("logs --release his", {}, 78, "no release his of nouscoder in namespace team: there are mine, yours"),
        ("pause", {}, 2, "namespace team has several releases, name one by --release: mine, yours"),
    ],
)
def test_what_is_refused_or_not_there_is_one_sentence(
    words: str, refused: dict[str, int], code: int, said: str, kubeconfig: Path
) -> None:
    cluster = release(refused=refused)
    if not refused:
        cluster.pods.append(pod("broker", release="yours"))
    command, *more = words.split()
    with serving(cluster, kubeconfig):
        done = command_line.nouscoder(command, "--cluster", *more)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert said in done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no cluster is configured: set KUBECONFIG"),
        ("{", "no cluster is configured: set KUBECONFIG"),
        ("- 1\n", "no cluster is configured: set KUBECONFIG"),
        ("clusters: 1\n", "no cluster is configured: set KUBECONFIG"),
        ("nowhere", "cannot list pods in namespace team: the API server does not answer (NewConnectionError)"),
    ],
)
def test_a_kubeconfig_that_leads_nowhere_is_one_sentence(text: str | None, said: str, kubeconfig: Path) -> None:
    if text == "nowhere":
        write_kubeconfig(kubeconfig, "http://127.0.0.1:9")
    elif text is not None:
        kubeconfig.write_text(text)
    done = command_line.nouscoder("status", "--cluster")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (ExitCode.UNAVAILABLE, "", 1)
    assert said in done.stderr


def test_logs_are_merged_by_time_also_of_nodes_with_other_time_zones(
    kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of the node in place of a log is no line; a container that waits to start has none; KUBECONFIG may name
    several files."""
    logs = {
        ("mine-broker-7", "broker"): "2026-11-29T09:00:01.5Z b1\n2026-11-29T09:00:03.1Z b2\u2028b2\n",
        ("mine-learner-7", "run"): "2026-11-29T11:00:02.123456789+02:00 r1\x1b[1m\n2026-11-29T09:0",
        ("mine-generation-7", "generation"): "unable to retrieve container logs for containerd://1",
    }
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", f"{kubeconfig}:{kubeconfig}2")
    with serving(release(logs=logs), kubeconfig):
        done = command_line.nouscoder("logs", "--cluster")
        as_json = command_line.nouscoder("logs", "--cluster", "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    assert [line.split(" ", 1)[1] for line in done.stdout.split("\n")[:-1]] == [
        "broker mine-broker-7 b1",
        "run mine-learner-7 r1?[1m",
        "broker mine-broker-7 b2?b2",
    ]
    records = [json.loads(line) for line in as_json.stdout.split("\n")[:-1]]
    first = {"time": "2026-11-29T09:00:01.5Z", "service": "broker", "pod": "mine-broker-7", "line": "b1"}
    assert (records[0], records[1]["service"]) == (first, "run")


def test_the_pages_are_on_this_machine_until_ctrl_c(kubeconfig: Path, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"text": "x" * 300_000}))
    cluster, taken = release(), socket.create_server(("127.0.0.1", 0))
    command = [sys.executable, "-m", "nouscoder", "pages", "--cluster", "--port"]
    with serving(cluster, kubeconfig), open_pages(tmp_path, "127.0.0.1:0") as address, taken:
        cluster.places[8090] = int(address.rpartition(":")[2])
        refused = command_line.nouscoder("pages", "--cluster", "--port", taken.getsockname()[1])
        shown = subprocess.Popen(
            [*command, "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
        )
        try:
            assert shown.stdout is not None
            page = shown.stdout.readline().split()[8]
            with urllib.request.urlopen(f"{page}summary.json", timeout=60) as answer:
                assert len(answer.read()) == 300_012
            cluster.places.clear()
            for _ in range(2):
                with pytest.raises((RemoteDisconnected, ConnectionResetError)):
                    urllib.request.urlopen(page, timeout=60)
            cluster.refused["pods"] = 403
            for _ in range(2):
                with pytest.raises((RemoteDisconnected, ConnectionResetError)):
                    urllib.request.urlopen(page, timeout=60)
        finally:
            shown.send_signal(signal.SIGINT)
            _, said = shown.communicate(timeout=60)
    assert (refused.exit_code, refused.stderr.count("\n")) == (ExitCode.UNUSABLE, 1)
    assert "name another --port" in refused.stderr
    lost, not_allowed = "connect to port 8090: connection refused", "this account may not list pods in namespace team"
    assert said.split("\n") == [lost, lost, not_allowed, "nouscoder: interrupted", ""]
    assert shown.returncode in (ExitCode.INTERRUPTED, -signal.SIGINT)


def test_logs_and_pages_of_this_machine_are_named() -> None:
    for command, said in (("logs", "runs/NAME/logs/*.log"), ("pages", "run.pages")):
        done = command_line.nouscoder(command)
        assert (done.exit_code, said in done.stderr) == (ExitCode.USAGE, True)
    mixed = command_line.nouscoder("status", "--cluster", "--broker", "127.0.0.1:1")
    assert (mixed.exit_code, "--broker" in mixed.stderr) == (ExitCode.USAGE, True)
